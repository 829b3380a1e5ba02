"""Methods of single modules overridden: each such module gets a subclass of its own class.

`override(module, kind, facts)` makes a subclass of the module's class, with the methods that `kind`
makes of that class and the facts, and puts it in the place of the module's class. Everything else
of the module stays: its attributes, children, parameters and hooks. No other module of the class
notices. The subclass has the name of the class, and modules of it can be copied and pickled: what
is written is the class itself, the kinds and the facts. Subclasses are made once for equal facts,
so that what torch.compile knows of one layer holds for all.

`fully_shard` of FSDP2 gives a module a class too, of its own methods and the module's class. There
it is the module's class that is overridden, as if that had come first.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

# What makes the methods of a kind, from the class to be overridden and the facts.
Methods = Callable[[type, Any], dict[str, Callable[..., Any]]]

KINDS: dict[str, Methods] = {}

# Of a subclass: the class that it stands for, the kind and the facts.
OVERRIDDEN = "_liger_ops_overridden"

_subclasses: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()

# By FSDP2's methods and the class that they are added to.
_sharded_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def kind(name: str) -> Callable[[Methods], Methods]:
    """Register what makes the methods of a kind. Facts are hashable, and can be pickled."""

    def register(methods: Methods) -> Methods:
        KINDS[name] = methods
        return methods

    return register


def override(module: nn.Module, name: str, facts: Hashable) -> None:
    """Override a module's methods by those of kind `name`. Kinds can be stacked."""
    set_class(module, _subclass(class_of(module), name, facts))


def overrides(module: nn.Module) -> dict[str, Any]:
    """The kinds by which a module is overridden, and their facts."""
    return {name: facts for _, name, facts in _layers(class_of(module))}


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class, without what FSDP2 has added to it."""
    cls = type(module)
    return cls.__bases__[1] if _is_sharded(cls) else cls


def set_class(module: nn.Module, cls: type) -> None:
    """Give a module another class, to which FSDP2's methods are added where it has them."""
    sharded: Any = type(module)
    if not _is_sharded(sharded):
        module.__class__ = cls
        return
    methods, base = sharded.__bases__
    _sharded_classes[methods, base] = sharded
    made = _sharded_classes.get((methods, cls))
    if made is None:
        namespace = {
            name: value
            for name, value in vars(sharded).items()
            if name not in ("__dict__", "__weakref__")
        }
        made = type(sharded)(sharded.__name__, (methods, cls), namespace)
        _sharded_classes[methods, cls] = made
    module.__class__ = made


def _is_sharded(cls: type) -> bool:
    """Whether `fully_shard` or `replicate` made a class."""
    # Where nobody has imported it, no class is of it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    mixin = getattr(fsdp, "FSDPModule", None)
    return mixin is not None and len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], mixin)


def in_place_of(original: Any, forward: Any) -> Any:
    """`forward`, a function of self and a tensor, with the name and the argument of `original`."""
    (argument,) = list(inspect.signature(original).parameters)[1:]
    source = f"lambda self, {argument}: forward(self, {argument})"
    return functools.wraps(original)(eval(source, {"forward": forward}))


def restore(model: nn.Module) -> int:
    """Undo every `override` in a model. Returns how many there were.

    Raises:
        RuntimeError: a module's class was made from an overriding one, as parametrizations do, and
            cannot be taken apart.
    """
    layers = {module: _layers(class_of(module)) for module in model.modules()}
    for module, found in layers.items():
        if not found and any(OVERRIDDEN in vars(base) for base in type(module).__mro__):
            raise RuntimeError(
                f"unfuse: the class of a {type(module).__name__} was changed after fuse;"
                " undo that first"
            )
    for module, found in layers.items():
        if found:
            set_class(module, found[0][0])
    return sum(len(found) for found in layers.values())


def _layers(subclass: type) -> list[tuple[type, str, Any]]:
    """From the first override to the last: the class overridden, the kind and the facts."""
    found = []
    while OVERRIDDEN in vars(subclass):
        found.append(vars(subclass)[OVERRIDDEN])
        subclass = found[-1][0]
    return found[::-1]


def _subclass(base: type, name: str, facts: Hashable) -> type:
    key = (base, name, facts)
    if key not in _subclasses:
        namespace: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce,
            OVERRIDDEN: key,
            **KINDS[name](base, facts),
        }
        subclass = type(base)(base.__name__, (base,), namespace)
        return _subclasses.setdefault(key, subclass)
    return _subclasses[key]


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """What the class would write, but for the subclass, which `_rebuilt` makes again."""
    cls = type(self)
    layers = _layers(next(base for base in cls.__mro__ if OVERRIDDEN in vars(base)))
    base: Any = layers[0][0]
    make, arguments, *state = base.__reduce_ex__(self, protocol)
    arguments = tuple(base if argument is cls else argument for argument in arguments)
    kinds = tuple((name, facts) for _, name, facts in layers)
    return _rebuilt, (make, arguments, kinds), *state


def _rebuilt(make: Callable[..., Any], arguments: Any, kinds: Any) -> Any:
    module = make(*arguments)
    for name, facts in kinds:
        override(module, name, facts)
    return module
