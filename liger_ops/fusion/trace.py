"""Trace code once with fake tensors, into a graph like Dynamo's.

Dynamo itself takes 50 to 200 ms for each piece of code, and this 1 to 10: the code runs in Python,
and its calls of PyTorch functions on tensors are recorded. Code that uses no tensor, and effects on
anything but a call's arguments and result, are not recorded: callers check attributes for those.
"""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..rewrites.engine.canonical import IDENTITY, canonical
from ..rewrites.engine.effects import writes
from ..torch_private import FakeTensorMode
from .asked import runs_library_code_alone, unwatched
from .probing import DEVICE, NotAnOp

# Types of results that are properties of a tensor, and no computation.
CONSTANTS = (
    bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# Reflected operators, whose left operand is a number, by the methods that Python calls.
REFLECTED = {
    "__rsub__": operator.sub,
    "__rtruediv__": operator.truediv,
    "__rdiv__": operator.truediv,
    "__rpow__": operator.pow,
}

# Attributes of autograd, which differ between a training step and a trace.
AUTOGRAD_ATTRIBUTES = {"requires_grad", "grad_fn", "is_leaf", "grad", "retains_grad", "_version"}

# Operations whose result has the same elements as their first argument.
UNCHANGED = {IDENTITY, "contiguous"}


# Sizes in a trace that stand for any size, keyed by the small sizes that a test would use. They are
# primes that no model has for a width, so that a multiple of one can only come from it.
ANY_SIZES = {2: 1009, 3: 1013, 4: 1019, 5: 1021}


class _AnySize(int):
    """A size that stands for any size. Its trace is marked if code decides by it.

    Symbolic shapes of PyTorch show the same, and take ten times as long.
    """

    trace: Trace

    def __new__(cls, size: int, trace: Trace) -> _AnySize:
        any_size = super().__new__(cls, size)
        any_size.trace = trace
        return any_size

    def __hash__(self) -> int:
        return super().__hash__()


def _deciding_method(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def decide(self: _AnySize, *others: Any) -> Any:
        is_same = all(isinstance(other, _AnySize) and int.__eq__(other, self) for other in others)
        if self.trace.is_watching and not (others and is_same):
            self.trace.decides = True
        return method(self, *others)

    return decide


def _computing_method(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def compute(self: _AnySize, *others: Any) -> Any:
        result = method(self, *others)
        return _AnySize(result, self.trace) if type(result) is int else result

    return compute


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "truediv", "rtruediv", "pow",
):  # fmt: skip
    setattr(_AnySize, f"__{_name}__", _deciding_method(f"__{_name}__"))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "neg"):
    setattr(_AnySize, f"__{_name}__", _computing_method(f"__{_name}__"))


class Trace(TorchFunctionMode):
    """Record the calls of PyTorch functions while it is active.

    Attributes:
        graph: the calls; a node's value is its meta["example_value"].
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self.is_watching = self.decides = False
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace the body with gradients, without autocast and on fake tensors.

        Raises:
            NotAnOp: the body decides by a size of `ANY_SIZES` what it computes.
        """
        with (
            _silenced(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(DEVICE.type, enabled=False),
            self._fake_mode,
            self,
        ):
            self.is_watching = True
            yield
            self.is_watching = False
        if self.decides:
            raise NotAnOp("it computes something else for other lengths or batches")

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Add an input without data to the graph, while it is traced or before."""
        with torch.DisableTorchFunction(), self._fake_mode:
            tensor = torch.empty(shape, dtype=dtype, device=DEVICE)
        self.add(name, tensor)
        return tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Declare a tensor to be an input of the graph."""
        self._remember(self.graph.placeholder(name), tensor)

    def node(self, value: Any) -> Any:
        """Return the node of a tensor, or any other value unchanged."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            self.add(f"constant_{len(self._alive)}", value)
        return self._nodes[id(value)]

    def module(self, result: Any) -> fx.GraphModule:
        """Return the recorded graph, with a tensor or a structure of tensors as its result."""
        self.graph.output(pytree.tree_map(self.node, result))
        return _Module(torch.nn.Module(), self.graph)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.is_watching, before = False, self.is_watching
        try:
            arguments = _with_plain_ints((args, kwargs or {}))
            is_library = runs_library_code_alone(func, types, arguments)
            with unwatched() if is_library else nullcontext():
                return self._called(func, *arguments)
        finally:
            self.is_watching = before

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            getattr(func, "__name__", "") == "__get__"
            and func.__self__.__name__ in AUTOGRAD_ATTRIBUTES
        ):
            raise NotAnOp(f"it reads {func.__self__.__name__} of a tensor")
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__len__" and type(self._watched(result)) is not int:
            # `len` returns a plain int: decisions by it could not be seen.
            self.decides = True
        leaves = pytree.tree_leaves(result)
        if leaves and all(isinstance(leaf, CONSTANTS) for leaf in leaves) or result == ():
            return pytree.tree_map_only(int, self._watched, result)
        kind, target, args = _as_dynamo_writes(func, args)
        arguments = pytree.tree_map(self.node, (tuple(args), kwargs))
        node = self.graph.create_node(kind, target, *arguments)
        node.meta["example_value"] = result
        if not writes(node):
            if id(result) in self._nodes:
                # The cast or copy returned its input.
                self.graph.erase_node(node)
                return result
            if not torch.is_grad_enabled() or torch.is_autocast_enabled(DEVICE.type):
                # The code changed the mode. No pattern may match this node as if it had not.
                node.op, node.target = "call_function", _in_another_mode
        else:
            # After an in-place operation the tensor's node is the operation.
            self._nodes.pop(id(result), None)
        self._remember(node, result)
        return result

    def _watched(self, size: int) -> int:
        is_any = type(size) is int and size and any(size % n == 0 for n in ANY_SIZES.values())
        return _AnySize(size, self) if is_any else size

    def _remember(self, node: fx.Node, result: Any) -> None:
        node.meta["example_value"] = result
        self._alive.append(result)
        if isinstance(result, Tensor):
            self._nodes.setdefault(id(result), node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._remember(self.graph.call_function(operator.getitem, (node, i)), item)


class _Module(fx.GraphModule):
    """A graph that does not run, for which no Python code is generated."""

    def recompile(self) -> Any:
        pass


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence the log of fake tensors; code that does not accept them raises anyway."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _with_plain_ints(value: Any) -> Any:
    """Return the arguments of a call with plain ints in the place of any sizes."""
    if isinstance(value, slice):
        return slice(*map(_with_plain_ints, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {name: _with_plain_ints(item) for name, item in value.items()}
    if type(value) in (tuple, list, torch.Size):
        return type(value)([_with_plain_ints(item) for item in value])
    return int.__pos__(value) if isinstance(value, _AnySize) else value


def unchanged(node: fx.Node) -> fx.Node:
    """Return the node of which `node` is a copy, or `node` itself."""
    while (call := canonical(node)) is not None and call.op in UNCHANGED:
        node = call.args[0]
    return node


def _in_another_mode(*args: Any, **kwargs: Any) -> None:
    """Stand for a function that was called in another gradient or autocast mode."""


def _as_dynamo_writes(func: Any, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the kind of node, the target and the arguments that Dynamo would write for a call."""
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__":
        return "call_function", getattr, (args[0], owner.__name__)  # type: ignore[union-attr]
    if name in REFLECTED:
        return "call_function", REFLECTED[name], args[1::-1]
    if name in ("__getitem__", "__setitem__"):
        return "call_function", getattr(operator, name.strip("_")), args
    is_method = isinstance(func, (types.MethodDescriptorType, types.WrapperDescriptorType))
    if is_method or getattr(func, "__qualname__", "").startswith(("Tensor.", "TensorBase.")):
        return "call_method", name, args
    return "call_function", func, args
