"""The memory that nodes write to: what PyTorch's operators write when a node's call runs.

The call runs on fake tensors, once for each different call, and the schemas of the operators that
it arrives at say which tensors are written: those of `out`, of `inplace` by name or by position, of
methods in place, running statistics, and the weights that `max_norm` renormalises. A call that
cannot run so is unknown, and treated as the worst case: it writes everywhere.

A function of PyTorch's own arrives at the same operators in every graph, so that its calls are
known for the whole process, by the kinds of the tensors: a size counts as 0, 1, more or symbolic,
which is what PyTorch itself distinguishes where it compiles for all sizes.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
)
from .canonical import value
from .memory import ANYWHERE, is_plain, memory, unwrapped
from .replay import fake_mode_of, replay

_KERNELS_OF_USERS = "triton_kernel_wrapper"

_SYMBOLS = torch.SymBool, torch.SymInt, torch.SymFloat
NUMBERS = (bool, int, float, complex, *_SYMBOLS)

# The places of inputs that a call writes to; None if that is unknown.
_Places = list[int] | None
# In a node's meta: its target and arguments, and the memory that it writes to with these.
_WRITTEN = "liger_ops.written"
# Layers and models repeat them: `fuse` makes 4944 calls in 40 models, of which 400 differ here.
_calls: dict[Any, _Places] = {}

_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, OpOverload
# Constants that cannot change, and whose text says all.
_CONSTANTS = (
    *(*NUMBERS, str, slice, types.NoneType, types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def writes(node: fx.Node) -> bool:
    """Whether `node` writes to a tensor that it did not create."""
    return bool(written(node))


def written(node: fx.Node) -> set[int]:
    """The memory that `node` writes to: see `memory`."""
    if isinstance(node.target, HigherOrderOperator):
        return _written_in_subgraphs(node)
    call = (node.target, node.args, node.kwargs)
    known = node.meta.get(_WRITTEN)
    if known is None or any(a is not b for a, b in zip(known[0], call, strict=True)):
        known = node.meta[_WRITTEN] = (call, _written_by(node))
    keys: set[int] = known[1]
    return keys


def _written_in_subgraphs(node: fx.Node) -> set[int]:
    """No memory, or ANYWHERE: a subgraph that is called twice shows the inputs of one call only."""
    if _KERNELS_OF_USERS in node.target.name():  # type: ignore[union-attr]
        return {ANYWHERE}
    for part in subgraphs(node):
        inputs = memory(inner for inner in part.graph.nodes if inner.op == "placeholder")
        if any(written(inner) & {*inputs, ANYWHERE} for inner in part.graph.nodes):
            return {ANYWHERE}
    return set()


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs among the arguments of a higher-order operator's node."""
    owner = node.graph.owning_module
    given = [getattr(owner, str(one.target), None) for one in node.all_input_nodes if _is_attr(one)]
    return [one for one in given if isinstance(one, fx.GraphModule)]


def _is_attr(node: fx.Node) -> bool:
    return node.op == "get_attr"


def _written_by(node: fx.Node) -> set[int]:
    if node.op in ("placeholder", "get_attr", "output"):
        return set()
    inputs = {one: value(one) for one in node.all_input_nodes if not _is_context(one)}
    if node.op == "call_module" or any(known is None for known in inputs.values()):
        return {ANYWHERE}
    tensors = [one for one in pytree.tree_leaves([*inputs.values()]) if isinstance(one, Tensor)]
    if not tensors:
        return set()
    mode: Any = fake_mode_of(map(_innermost, tensors))
    are_plain = all(map(is_plain, tensors))
    if are_plain and not isinstance(mode, FakeTensorMode):
        mode = FakeTensorMode()
    call = _described(node, inputs) if are_plain and _is_of_torch(node, inputs) else None
    places = None if call is None else _calls.get(call)
    if places is None:
        places = _run(node, inputs, mode)
        if call is not None:
            _calls[call] = places
    nodes = [*inputs]
    return {ANYWHERE} if places is None else memory(nodes[place] for place in places)


def _is_of_torch(node: fx.Node, inputs: Mapping[fx.Node, Any]) -> bool:
    """Whether a function of PyTorch is called with tensors and constants alone."""
    target = node.target
    owner = str(getattr(target, "__module__", "")).split(".")[0]
    if node.op == "call_function" and not (
        isinstance(target, _FUNCTIONS)
        and owner in ("torch", "_operator", "builtins")
        and "<locals>" not in getattr(target, "__qualname__", "")
    ):
        return False
    leaves = pytree.tree_leaves([node.args, node.kwargs, *inputs.values()])
    return all(isinstance(leaf, (Tensor, fx.Node, *_CONSTANTS)) for leaf in leaves)


def _is_context(node: fx.Node) -> bool:
    """Whether a value that is no example is a context, such as autocast's: no tensor enters it."""
    return node.op == "call_function" and not node.all_input_nodes and value(node) is None


def _described(node: fx.Node, inputs: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """The call of `node`, equal for nodes that differ in their inputs' data and sizes alone."""
    kinds = [pytree.tree_map(_kind, known) for known in inputs.values()]
    names = {one: f"{place}{kinds[place]}" for place, one in enumerate(inputs)}
    return node.op, node.target, repr(fx.map_arg((node.args, node.kwargs), names.get))


def _kind(known: Any) -> Any:
    if isinstance(known, Tensor):
        sizes = [min(one, 2) if type(one) is int else _kind(one) for one in known.shape]
        return sizes, known.dtype, known.device
    return type(known) if type(known) in _SYMBOLS else known


def _run(node: fx.Node, inputs: Mapping[fx.Node, Any], mode: Any) -> _Places:
    """Run the call of `node` with copies of its inputs that have no data.

    A call of tensors of several dtypes, which autocast would cast, runs within autocast alone.
    """
    leaves = pytree.tree_leaves([*inputs.values()])
    device = next(one.device.type for one in leaves if isinstance(one, Tensor))
    if not torch.amp.is_autocast_available(device):
        return _run_within(contextlib.nullcontext(), node, inputs, mode)
    places = None
    for enabled in (False, True):
        if places is None:
            autocast = torch.autocast(device, torch.bfloat16, enabled)
            places = _run_within(autocast, node, inputs, mode)
    return places


def _run_within(
    autocast: contextlib.AbstractContextManager[Any],
    node: fx.Node, inputs: Mapping[fx.Node, Any], mode: Any,
) -> _Places:  # fmt: skip
    run = _Run()
    try:
        with autocast, _tracing(mode):
            copies = [pytree.tree_map(_copied, known) for known in inputs.values()]
            given = dict(zip(inputs, copies, strict=True))
            with run:
                replay(node, *fx.map_arg((node.args, node.kwargs), given.get))
    except Exception:
        # A number that is read from data ends the call whose result it is, as in `item`.
        if not run.reads_data or not isinstance(value(node), NUMBERS):
            return None
    found = memory(run.written)
    places = [
        place
        for place, copy in enumerate(copies)
        if memory([copy]) & found or any(map(_is_detached, pytree.tree_leaves(copy)))
    ]
    return None if ANYWHERE in found else places


class _Run(TorchDispatchMode):
    """Records the tensors that operators write to, by their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.reads_data = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.reads_data = torch.Tag.data_dependent_output in func.tags
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                self.written.append(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    """Run operators as a tracer does, without gradients.

    The python dispatcher decomposes batch_norm, whose own schema hides its running statistics.
    """
    shapes = getattr(mode, "shape_env", None)
    fresh = contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    with mode, fresh, torch.inference_mode(False), torch.no_grad(), enable_python_dispatcher():
        yield


def _innermost(tensor: Tensor) -> Tensor:
    """The tensor within wrappers of transforms, and the first within those of subclasses."""
    tensor = unwrapped(tensor)
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = unwrapped(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
    return tensor


def _copied(known: Any) -> Any:
    """An empty tensor like `known`. It requires a gradient, so that `detach_` shows."""
    if not isinstance(known, Tensor):
        return known
    if not is_plain(unwrapped(known)):
        # A subclass, such as DTensor, may have more than a layout: it is copied as it is.
        return known.detach()
    how: dict[str, Any] = {"dtype": known.dtype, "device": known.device}
    copy = torch.empty_strided(known.shape, known.stride(), **how)
    return copy.requires_grad_(_has_gradients(copy))


def _is_detached(copy: Any) -> bool:
    return (
        isinstance(copy, Tensor)
        and is_plain(copy)
        and _has_gradients(copy)
        and not copy.requires_grad
    )


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
