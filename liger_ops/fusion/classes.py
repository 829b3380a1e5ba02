"""Override methods of single modules: each such module gets a subclass of its own class.

`override(module, kind, facts)` creates a subclass of the module's class, and sets it as the
module's class. The function that is registered for the kind makes the subclass's methods from the
class and the facts. The module keeps its attributes, children, parameters and hooks, and other
modules of the class do not change. The subclass has the name of the class. Its modules can be
copied and pickled: the pickle holds the original class, the kinds and the facts. Subclasses are
cached by facts, so that layers with equal facts share compiled code.

`fully_shard` of FSDP2 also sets a module's class, to one that adds FSDP2's methods. Then the class
below it is overridden, as if `fuse` had come first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

# A function that makes the methods of a kind, from the class to be overridden and the facts.
Methods = Callable[[type, Any], dict[str, Any]]

KINDS: dict[str, Methods] = {}
# The kinds that `restore` does not count, because they only serve another kind.
UNCOUNTED: set[str] = set()

# Attribute of a subclass: a tuple of the class that it replaces, the kind and the facts.
OVERRIDDEN = "_liger_ops_overridden"
# Attribute of a subclass: the class that the module had before `fuse`.
BEFORE = "_liger_ops_before"

_subclasses: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()

# Cache: (class with FSDP2's methods, class that they are added to) -> combined class.
_sharded_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def kind(name: str, counts: bool = True) -> Callable[[Methods], Methods]:
    """Register the function that makes the methods of a kind. Facts are hashable and picklable."""

    def register(methods: Methods) -> Methods:
        KINDS[name] = methods
        if not counts:
            UNCOUNTED.add(name)
        return methods

    return register


def override(module: nn.Module, name: str, facts: Hashable) -> None:
    """Override a module's methods with those of kind `name`. Kinds can be stacked."""
    set_class(module, _subclass(class_of(module), name, facts))


def overrides(module: nn.Module) -> dict[str, Any]:
    """Return the facts of the kinds with which a module is overridden, by kind."""
    return {name: facts for _, name, facts in _layers(class_of(module))}


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, without the methods that FSDP2 added to it."""
    cls = type(module)
    return cls.__bases__[1] if _is_sharded(cls) else cls


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before `fuse`, without the methods that FSDP2 added to it."""
    cls = class_of(module)
    before: type[nn.Module] = getattr(cls, BEFORE, cls)
    return before


def set_class(module: nn.Module, cls: type) -> None:
    """Set a module's class, and keep FSDP2's methods if the module has them."""
    sharded: Any = type(module)
    if not _is_sharded(sharded):
        module.__class__ = cls
        return
    methods, base = sharded.__bases__
    _sharded_classes[methods, base] = sharded
    combined = _sharded_classes.get((methods, cls))
    if combined is None:
        namespace = {
            name: value
            for name, value in vars(sharded).items()
            if name not in ("__dict__", "__weakref__")
        }
        combined = type(sharded)(sharded.__name__, (methods, cls), namespace)
        _sharded_classes[methods, cls] = combined
    module.__class__ = combined


def _is_sharded(cls: type) -> bool:
    """Return whether a class was created by `fully_shard` or `replicate`."""
    # If torch.distributed.fsdp was never imported, no class was made by it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    mixin = getattr(fsdp, "FSDPModule", None)
    return mixin is not None and len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], mixin)


def restore(model: nn.Module) -> int:
    """Undo every `override` in a model, and return how many there were.

    Raises:
        RuntimeError: a module's class was derived from an overriding one, as parametrizations do,
            so that the two cannot be separated.
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
    return sum(name not in UNCOUNTED for found in layers.values() for _, name, _ in found)


def _layers(subclass: type) -> list[tuple[type, str, Any]]:
    """Return the overridden class, the kind and the facts of each override, the first one first."""
    layers = []
    while OVERRIDDEN in vars(subclass):
        layers.append(vars(subclass)[OVERRIDDEN])
        subclass = layers[-1][0]
    return layers[::-1]


def _subclass(base: type, name: str, facts: Hashable) -> type:
    key = (base, name, facts)
    if key not in _subclasses:
        namespace: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce,
            OVERRIDDEN: key,
            BEFORE: getattr(base, BEFORE, base),
            **KINDS[name](base, facts),
        }
        subclass = type(base)(base.__name__, (base,), namespace)
        return _subclasses.setdefault(key, subclass)
    return _subclasses[key]


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Pickle with the original class's method, and have `_rebuild` create the subclass again."""
    cls = type(self)
    layers = _layers(next(base for base in cls.__mro__ if OVERRIDDEN in vars(base)))
    base: Any = layers[0][0]
    make, arguments, *state = base.__reduce_ex__(self, protocol)
    arguments = tuple(base if argument is cls else argument for argument in arguments)
    kinds = tuple((name, facts) for _, name, facts in layers)
    return _rebuild, (make, arguments, kinds), *state


def _rebuild(make: Callable[..., Any], arguments: Any, kinds: Any) -> Any:
    module = make(*arguments)
    for name, facts in kinds:
        override(module, name, facts)
    return module
