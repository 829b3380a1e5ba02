"""What `fuse` assumed about a module: recorded while its code is traced, compared in each call.

A fused forward computes what the module's code computed in a trace. `Reads` records which
attributes that code reads, of the module, of the children that a fused forward does not call, and
of objects such as a configuration. `Assumptions` holds their values. Where one differs in a call,
the module's own code runs.

Dynamo traces the comparison, and makes guards of it. It does not guard on the hooks of a module
(`torch._dynamo.config.skip_nnmodule_hook_guards`), of a fused one or of any other.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .asked import is_library_code
from .classes import BEFORE
from .news import first_time
from .probing import HOOKS, MODULE_STATE, NotAnOp
from .sharding import keep_results, only_gather

# Types whose values do not change.
CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, range, enum.Enum,
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# The names of children, then those of attributes, that lead from a module to an object.
Path = tuple[tuple[str, ...], tuple[str, ...]]
SELF: Path = ((), ())

# Methods by which a module calls its forward, compiled or not.
CALL = ("_call_impl", "_compiled_call_impl")


class State(NamedTuple):
    """The state of a module, or of an object that is its attribute.

    constants and values: attributes by name, the latter frozen. present: parameters, buffers and
    children by the dict of the module and the name, and whether there is one. absent: names that
    the instance does not have, so that its class's attribute is read. missing: names that neither
    has. is_called: whether the fused forward calls the module.
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
        """The text that says what of this differs in a module, or None."""
        children, attributes = self.path
        one = module
        for name in children:
            one = one._modules.get(name)
            if one is None:
                return f"{'.'.join(children)} was removed"
        if attributes:
            return self._change_of_object(one)
        state = one.__dict__
        if children:
            cls = type(one)
            if getattr(cls, BEFORE, cls) is not self.cls:
                return f"{'.'.join(children)} is another module"
            if self.is_called:
                if not keep_results(one):
                    return f"{'.'.join(children)} has hooks that may change its results"
            elif (
                state["_forward_hooks"] or state["_forward_pre_hooks"]
                or state["_backward_hooks"] or state["_backward_pre_hooks"]
            ) and not only_gather(one):  # fmt: skip
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
                getattr(one, name, None)
        for kind, name, wanted in self.present:
            if (state[kind].get(name) is not None) is not wanted:
                return f"{'.'.join((*children, name))} was {'removed' if wanted else 'added'}"
        for name, value in self.values:
            if _frozen(state.get(name), name) != value:
                return f"{'.'.join((*children, name))} was changed"
        for name in self.missing:
            if hasattr(one, name):
                return f"{'.'.join((*children, name))} was added"
        return None

    def _change_of_object(self, one: Any) -> str | None:
        names = ".".join((*self.path[0], *self.path[1]))
        for name in self.path[1]:
            one = getattr(one, name, None)
        if type(one) is not self.cls:
            return f"{names} is another object"
        for name, constant in self.constants:
            if getattr(one, name, SELF) != constant:
                return f"{names}.{name} was changed"
        for name, value in self.values:
            if _frozen(getattr(one, name, None), name) != value:
                return f"{names}.{name} was changed"
        for name in self.missing:
            if hasattr(one, name):
                return f"{names}.{name} was added"
        return None


class Assumptions(NamedTuple):
    """The states with which a module's code was traced, and the dtypes of its input and of its
    other tensors for which the trace was the same."""

    states: tuple[State, ...]
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]

    def check(self, module: nn.Module) -> None:
        """Raise NotAnOp if they do not hold for a module that is to be fused."""
        for state in self.states:
            if reason := state.change(module):
                raise NotAnOp(reason)

    def hold(self, module: nn.Module, x: Tensor) -> bool:
        """Whether a fused method computes what the module's code does of x. Warns, once for a
        module and a reason, if the module has changed."""
        for state in self.states:
            reason = state.change(module)
            if reason is not None:
                warn_once(module, reason)
                return False
        return (x.dtype, x.dtype) in self.dtypes


class Reads:
    """The attributes that traced code reads of a module, its children and their attributes."""

    def __init__(self, stand_ins: Collection[str] = (), kept: Collection[str] = ()) -> None:
        """`kept` are children whose code is traced, and that a fused forward calls too."""
        self._stand_ins, self._kept = stand_ins, kept
        self._names: dict[Path, dict[str, None]] = {}
        self._classes: dict[type, type] = {}

    @contextmanager
    def of(self, copied: nn.Module) -> Iterator[None]:
        """Record what the body reads of a copy of the module, whose children are copies too, but
        for the stand-ins. The hooks of its children, and forwards set on them, do not run."""
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
        self, module: nn.Module, dtypes: Collection[torch.dtype | tuple[torch.dtype, torch.dtype]]
    ) -> Assumptions:
        """What the code assumed of the module itself, of which a copy was traced. A dtype by itself
        is that of all tensors."""
        states = [self._state(module, path, names) for path, names in self._names.items()]
        used = tuple(state for state in states if state.path[0] or any(state[2:]))
        pairs = (one if isinstance(one, tuple) else (one, one) for one in dtypes)
        return Assumptions(used, tuple(pairs))

    def _recording(self, base: Any) -> Any:
        """A subclass whose instances record what is read of them."""

        def __getattribute__(one: Any, name: str) -> Any:
            paths = self._paths.get(id(one), ())
            if name == "__class__":
                return base
            if name == "__dict__" and paths and _gives(sys._getframe(1)):
                # What code does with it is not seen.
                where = ".".join((*paths[0][0], *paths[0][1]))
                raise NotAnOp(f"it reads the __dict__ of {where or 'itself'}")
            if name.startswith("__") or not paths:
                return base.__getattribute__(one, name)
            for path in paths:
                self._names.setdefault(path, {})[name] = None
            value = base.__getattribute__(one, name)
            if isinstance(value, Tensor) or name in MODULE_STATE or _is_frozen(value):
                return value
            return self._watched(paths[0], name, value)

        if base not in self._classes:
            namespace = {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__slots__": (),
                "__getattribute__": __getattribute__,
            }
            self._classes[base] = type(base)(base.__name__, (base,), namespace)
        return self._classes[base]

    def _watched(self, path: Path, name: str, value: Any) -> Any:
        """A copy of an attribute's value that records what is read of it."""
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
        one = module
        for name in children:
            one = one._modules[name]
        for name in attributes:
            one = getattr(one, name)
        constants, values, present, absent, missing = [], [], [], [], []
        for name in names:
            if name in CALL or (path == SELF and name == "forward"):
                continue
            kind = None if attributes else _kind(one, name)
            if kind == "skipped":
                continue
            if name == "_modules":
                values.append((name, tuple(vars(one)[name])))
            elif kind is not None:
                # A child that is called has a state of its own, or is called by the fused forward.
                is_there = vars(one)[kind][name] is not None
                if kind != "_modules" or not is_there:
                    present.append((kind, name, is_there))
            elif not hasattr(one, name):
                missing.append(name)
            elif not attributes and (name not in vars(one) or name == "forward"):
                absent.append(name)
            else:
                value = getattr(one, name)
                if _is_constant(value):
                    constants.append((name, value))
                elif _is_frozen(value):
                    values.append((name, _frozen(value, name)))
        cls = None if path == SELF else getattr(type(one), BEFORE, type(one))
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


def _gives(frame: types.FrameType) -> bool:
    """Whether code that reads a module's __dict__ is not PyTorch's, or is `dir`."""
    return not is_library_code(frame) or frame.f_code.co_name == "__dir__"


def _kind(module: nn.Module, name: str) -> str | None:
    """The dict of a module in which an attribute is, or "skipped" if no value of it is assumed."""
    if name in MODULE_STATE:
        return None if name == "_modules" else "skipped"
    for kind in ("_modules", "_parameters", "_buffers"):
        if name in vars(module)[kind] and name not in vars(module):
            return kind
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
    """A hashable value that is equal for equal constants, and containers and functions of such.

    Raises:
        NotAnOp: the value is another object.
    """
    if isinstance(value, CONSTANTS):
        return value
    if name == "_modules":
        return tuple(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_frozen(one, name) for one in value)
    if isinstance(value, dict):
        return "dict", *((key, _frozen(one, name)) for key, one in value.items())
    if isinstance(value, functools.partial):
        # Dynamo of torch 2.11 makes a list of the arguments.
        parts = (value.func, tuple(value.args), value.keywords)
        return "partial", *(_frozen(one, name) for one in parts)
    if isinstance(value, types.MethodType):
        return value.__func__
    raise NotAnOp(f"it reads {name}, a {type(value).__name__}")


def is_set_on(module: nn.Module, name: str) -> bool:
    """Whether the instance has an attribute of this name, which hides the class's."""
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
