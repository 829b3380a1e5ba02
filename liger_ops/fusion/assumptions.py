"""Record what `fuse` assumes about a module while its code is traced, and compare it in each call.

A fused forward computes what the module's code computed in a trace. `Reads` records which
attributes that code reads: of the module, of the children that a fused forward does not call, and
of objects such as a configuration. `Assumptions` holds their values. If one differs in a call, the
module's own code runs, with one warning.

Dynamo traces the comparison, and makes guards of it. It does not guard on the hooks of any module,
fused or not (`torch._dynamo.config.skip_nnmodule_hook_guards`).
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .asked import is_library_code
from .classes import BEFORE
from .probing import HOOKS, MODULE_STATE, NotAnOp
from .sharding import keep_results, only_gather

_reasons_given: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def first_time(module: nn.Module, reason: str) -> bool:
    """Return whether this is the first call for a module and a reason, and remember it."""
    # DataParallel creates replicas in each step, so the key of a replica is its class.
    reasons = _reasons_given.setdefault(
        type(module) if "_is_replica" in vars(module) else module, set()
    )
    is_first = reason not in reasons
    reasons.add(reason)
    return is_first


# Types whose values do not change.
CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, range, enum.Enum,
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# The names of children, then the names of attributes, that lead from a module to an object.
Path = tuple[tuple[str, ...], tuple[str, ...]]
SELF: Path = ((), ())

# Methods by which a module calls its forward, compiled or not.
CALL = ("_call_impl", "_compiled_call_impl")


class State(NamedTuple):
    """The assumed state of a module, or of an object that is an attribute of one.

    Attributes:
        path: the path from the fused module.
        cls: the assumed class, None for the fused module itself.
        constants: attributes whose values cannot change in place, by name.
        values: other attributes by name, as `_frozen` values.
        present: parameters, buffers and children: the dict of the module that holds one, its name,
            and whether it is not None.
        absent: names that the instance does not have, so that the class's attribute is read.
        missing: names that neither the instance nor the class has.
        is_called: whether the fused forward calls the module.
    """

    path: Path
    cls: type | None
    constants: tuple[tuple[str, Any], ...]
    values: tuple[tuple[str, Any], ...]
    present: tuple[tuple[str, str, bool], ...]
    absent: tuple[str, ...]
    missing: tuple[str, ...]
    is_called: bool = False

    def change(self, module: Any) -> str | None:
        """Return a text that says which of this differs in a module, or None."""
        children, attributes = self.path
        target = module
        for name in children:
            target = target._modules.get(name)
            if target is None:
                return f"{'.'.join(children)} was removed"
        if attributes:
            return self._change_of_object(target)
        state = target.__dict__
        if children:
            cls = type(target)
            if getattr(cls, BEFORE, cls) is not self.cls:
                return f"{'.'.join(children)} is another module"
            if self.is_called:
                if not keep_results(target):
                    return f"{'.'.join(children)} has hooks that may change its results"
            elif (
                state["_forward_hooks"] or state["_forward_pre_hooks"]
                or state["_backward_hooks"] or state["_backward_pre_hooks"]
            ) and not only_gather(target):  # fmt: skip
                return f"{'.'.join(children)}, which would not be called, has hooks"
        for name, constant in self.constants:
            if name not in state or state[name] != constant:
                return f"{'.'.join((*children, name))} was changed"
        is_compiling = bool(self.absent) and torch.compiler.is_compiling()
        for name in self.absent:
            if name in state:
                return f"{'.'.join((*children, name))} was set on the instance"
            if is_compiling:
                # Dynamo guards on an absent name if it is looked up.
                getattr(target, name, None)
        for owner, name, wanted in self.present:
            if (state[owner].get(name) is not None) is not wanted:
                return f"{'.'.join((*children, name))} was {'removed' if wanted else 'added'}"
        for name, value in self.values:
            if _frozen(state.get(name), name) != value:
                return f"{'.'.join((*children, name))} was changed"
        for name in self.missing:
            if hasattr(target, name):
                return f"{'.'.join((*children, name))} was added"
        return None

    def _change_of_object(self, target: Any) -> str | None:
        names = ".".join((*self.path[0], *self.path[1]))
        for name in self.path[1]:
            target = getattr(target, name, None)
        if type(target) is not self.cls:
            return f"{names} is another object"
        for name, constant in self.constants:
            if getattr(target, name, SELF) != constant:
                return f"{names}.{name} was changed"
        for name, value in self.values:
            if _frozen(getattr(target, name, None), name) != value:
                return f"{names}.{name} was changed"
        for name in self.missing:
            if hasattr(target, name):
                return f"{names}.{name} was added"
        return None


class Assumptions(NamedTuple):
    """The states with which a module's code was traced, and the dtypes in which its program was
    the same: pairs of the input's and the other tensors'."""

    states: tuple[State, ...]
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]

    def check(self, module: nn.Module) -> None:
        """Raise NotAnOp if a module that is to be fused differs from the assumed states."""
        for state in self.states:
            if reason := state.change(module):
                raise NotAnOp(reason)

    def hold(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether a fused method computes for x what the module's code does. If the module
        has changed, warn once for the module and the reason."""
        for state in self.states:
            reason = state.change(module)
            if reason is not None:
                warn_once(module, reason)
                return False
        return (x.dtype, x.dtype) in self.dtypes


class Reads:
    """A record of the attributes that traced code reads: of a module, of its children, and of
    objects that are their attributes."""

    def __init__(self, stand_ins: Collection[str] = (), kept: Collection[str] = ()) -> None:
        """`stand_ins` are the children without a record, and `kept` those whose code is traced and
        that a fused forward calls nevertheless."""
        self._stand_ins, self._kept = stand_ins, kept
        self._names: dict[Path, dict[str, None]] = {}
        self._classes: dict[type, type] = {}

    @contextmanager
    def of(self, copied: nn.Module) -> Iterator[None]:
        """Record what the body reads of a copy of the module, whose children are copies too, except
        for the stand-ins. Hooks of the children, and forwards set on them, do not run."""
        self._paths: dict[int, list[Path]] = {}
        self._objects: dict[tuple[Path, str], Any] = {}
        modules = {}
        for where, module in copied.named_modules(remove_duplicate=False):
            children = tuple(where.split(".")) if where else ()
            if children[:1] and children[0] in self._stand_ins:
                continue
            if children:
                vars(module).pop("forward", None)
                vars(module).update({name: OrderedDict() for name in HOOKS})
            self._paths.setdefault(id(module), []).append((children, ()))
            modules[module] = type(module)
        try:
            for module, cls in modules.items():
                module.__class__ = self._recording(cls)
            yield
        finally:
            for module, cls in modules.items():
                module.__class__ = cls

    def assumptions(
        self, module: nn.Module, dtypes: Collection[tuple[torch.dtype, torch.dtype]]
    ) -> Assumptions:
        """Return the assumptions about a module of which a copy was traced, with the pairs of
        dtypes in which its program was the same."""
        states = [self._state(module, path, names) for path, names in self._names.items()]
        used = tuple(state for state in states if state.path[0] or any(state[2:]))
        return Assumptions(used, tuple(dtypes))

    def _recording(self, base: Any) -> Any:
        """Return a subclass of `base` whose instances record which of their attributes are read."""

        def __getattribute__(instance: Any, name: str) -> Any:
            paths = self._paths.get(id(instance), ())
            if name == "__class__":
                return base
            if name == "__dict__" and paths and _exposes_dict(sys._getframe(1)):
                # Reads from the dict are not recorded.
                where = ".".join((*paths[0][0], *paths[0][1]))
                raise NotAnOp(f"it reads the __dict__ of {where or 'itself'}")
            if name.startswith("__") or not paths:
                return base.__getattribute__(instance, name)
            for path in paths:
                self._names.setdefault(path, {})[name] = None
            value = base.__getattribute__(instance, name)
            if isinstance(value, Tensor) or name in MODULE_STATE or _is_frozen(value):
                return value
            return self._recording_copy(paths[0], name, value)

        if base not in self._classes:
            namespace = {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__slots__": (),
                "__getattribute__": __getattribute__,
            }
            self._classes[base] = type(base)(base.__name__, (base,), namespace)
        return self._classes[base]

    def _recording_copy(self, path: Path, name: str, value: Any) -> Any:
        """Return a copy of an attribute's value that records which of its attributes are read."""
        key = path, name
        if key not in self._objects:
            recording = self._recording(type(value))
            try:
                if isinstance(value, nn.Module):
                    raise TypeError("a module that is not a child")
                copied = recording.__new__(recording)
                vars(copied).update(vars(value))
            except TypeError:
                raise NotAnOp(f"it reads its {name}, a {type(value).__name__}") from None
            self._paths[id(copied)] = [(path[0], (*path[1], name))]
            self._objects[key] = copied
        return self._objects[key]

    def _state(self, module: Any, path: Path, names: Collection[str]) -> State:
        children, attributes = path
        target = module
        for name in children:
            target = target._modules[name]
        for name in attributes:
            target = getattr(target, name)
        constants, values, present, absent, missing = [], [], [], [], []
        for name in names:
            if name in CALL or (path == SELF and name == "forward"):
                continue
            owner = None if attributes else _dict_of(target, name)
            if owner == "skipped":
                continue
            if name == "_modules":
                values.append((name, tuple(vars(target)[name])))
            elif owner is not None:
                # Not assumed of a child that is there: its own state is, or the fused forward calls
                # whatever child is there.
                is_there = vars(target)[owner][name] is not None
                if owner != "_modules" or not is_there:
                    present.append((owner, name, is_there))
            elif not hasattr(target, name):
                missing.append(name)
            elif not attributes and (name not in vars(target) or name == "forward"):
                absent.append(name)
            else:
                value = getattr(target, name)
                if _is_constant(value):
                    constants.append((name, value))
                elif _is_frozen(value):
                    values.append((name, _frozen(value, name)))
        cls = None if path == SELF else getattr(type(target), BEFORE, type(target))
        return State(
            path,
            cls,
            tuple(constants),
            tuple(values),
            tuple(present),
            tuple(absent),
            tuple(missing),
            bool(children) and children[0] in self._kept,
        )


def _exposes_dict(frame: types.FrameType) -> bool:
    """Return whether the code that reads a module's __dict__ is a model's, or `dir`."""
    return not is_library_code(frame) or frame.f_code.co_name == "__dir__"


def _dict_of(module: nn.Module, name: str) -> str | None:
    """Return the name of the dict of a module that holds an attribute, None for the instance or its
    class, or "skipped" if nothing is assumed about it."""
    if name in MODULE_STATE:
        return None if name == "_modules" else "skipped"
    for owner in ("_modules", "_parameters", "_buffers"):
        if name in vars(module)[owner] and name not in vars(module):
            return owner
    return "skipped" if isinstance(vars(module).get(name), Tensor) else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, CONSTANTS)


def _is_frozen(value: Any) -> bool:
    try:
        _frozen(value, "")
    except NotAnOp:
        return False
    return True


def _frozen(value: Any, name: str) -> Any:
    """Return a hashable value, equal for equal constants and for equal containers and functions.

    Raises:
        NotAnOp: the value is another kind of object, whose changes would not be seen.
    """
    if isinstance(value, CONSTANTS):
        return value
    if name == "_modules":
        return tuple(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_frozen(item, name) for item in value)
    if isinstance(value, dict):
        return "dict", *((key, _frozen(item, name)) for key, item in value.items())
    if isinstance(value, functools.partial):
        # Dynamo of torch 2.11 makes a list of the arguments.
        parts = (value.func, tuple(value.args), value.keywords)
        return "partial", *(_frozen(item, name) for item in parts)
    if isinstance(value, types.MethodType):
        return value.__func__
    raise NotAnOp(f"it reads {name}, a {type(value).__name__}")


def is_set_on(module: nn.Module, name: str) -> bool:
    """Return whether the instance has an attribute of this name, which hides the class's."""
    if torch.compiler.is_compiling():
        # Dynamo guards on an absent name if it is looked up.
        getattr(module, name, None)
    return name in vars(module)


def warn_once(module: nn.Module, reason: str) -> None:
    """Warn that a module runs its own code, once per module and reason."""
    if torch.compiler.is_compiling():
        # A warning would break the graph.
        return
    if first_time(module, reason):
        warnings.warn(
            f"liger_ops: {type(module).__name__} runs its own code, not a fused one: {reason}",
            stacklevel=4,
        )
