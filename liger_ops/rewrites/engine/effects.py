"""Find the memory that a node writes to, by running its call on fake tensors.

A mode records the operators that the call dispatches to. Their schemas say which tensors they
write: `out` arguments, `inplace` arguments by name or by position, the tensors of in-place methods,
running statistics, and the weights that `max_norm` renormalises. A call that cannot be run on fake
tensors is taken to write everywhere.

Memory has keys: two values share memory if they share a key. A tensor has the key of its storage,
as its views have. A tensor of unknown layout may be in any memory: its key is ANYWHERE.

A function of PyTorch dispatches to the same operators in every graph. The result for such a call is
therefore cached for the whole process. The key has each input's dtype, device and sizes, where a
size counts as 0, 1, more or symbolic: PyTorch itself distinguishes these when it compiles for all
sizes.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    enable_python_dispatcher,
)
from .canonical import OpOverload, value
from .insertion import fake_mode_of, replay

# The key of unknown memory. It may be any memory, so users of keys have to ask for it apart.
ANYWHERE = -1


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is an ordinary dense one, not a DTensor, a wrapper of vmap, ..."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor)
        and unwrapped(tensor) is tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


# Returns the tensor within the wrappers of torch.func transforms, or the tensor itself.
unwrapped = torch.func.debug_unwrap


def memory(nodes: Iterable[Any]) -> set[int]:
    """Return the keys of the memory of nodes or tensors; other values have none."""
    return {key for node in pytree.tree_leaves(list(nodes)) for key in _storages(value(node), node)}


def _storages(known: Any, node: Any) -> set[int]:
    if isinstance(known, (tuple, list)):
        return {key for item in known for key in _storages(item, item)}
    if isinstance(known, Tensor):
        known = unwrapped(known)
        return {known.untyped_storage()._cdata} if is_plain(known) else {ANYWHERE}
    # A node without an example value may be a tensor.
    return {ANYWHERE} if known is None and isinstance(node, fx.Node) else set()


_KERNELS_OF_USERS = "triton_kernel_wrapper"

_SYMBOLS = torch.SymBool, torch.SymInt, torch.SymFloat
NUMBERS = (bool, int, float, complex, *_SYMBOLS)

# The positions of the inputs that a call writes to; None if that is unknown.
_Positions = list[int] | None
# Key of a node's meta: its target and arguments, and the memory that it writes to with these.
_WRITTEN = "liger_ops.written"
# Cache: key of a call -> the inputs that it writes to. Layers and models repeat calls: `fuse` looks
# up 4944 calls in 40 models, which have 400 different keys.
_calls: dict[Any, _Positions] = {}

_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, OpOverload
# Types of immutable constants, which `repr` writes in full: keys of `_calls` are text.
_CONSTANTS = (
    *(*NUMBERS, str, slice, types.NoneType, types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def writes(node: fx.Node) -> bool:
    """Return whether `node` writes to a tensor that it did not create."""
    return bool(written(node))


def written(node: fx.Node) -> set[int]:
    """Return the keys of the memory that `node` writes to; see `memory`."""
    if isinstance(node.target, HigherOrderOperator):
        return _written_in_subgraphs(node)
    call = (node.target, node.args, node.kwargs)
    cached = node.meta.get(_WRITTEN)
    if cached is None or any(a is not b for a, b in zip(cached[0], call, strict=True)):
        cached = node.meta[_WRITTEN] = (call, _written_by(node))
    keys: set[int] = cached[1]
    return keys


def _written_in_subgraphs(node: fx.Node) -> set[int]:
    """Return the memory that the subgraphs of a node write to: none, or ANYWHERE.

    Which inputs of the node are written remains unknown: a subgraph that is called twice has the
    example values of one call only.
    """
    if _KERNELS_OF_USERS in node.target.name():  # type: ignore[union-attr]
        return {ANYWHERE}
    for module in subgraphs(node):
        inputs = memory(inner for inner in module.graph.nodes if inner.op == "placeholder")
        if any(written(inner) & {*inputs, ANYWHERE} for inner in module.graph.nodes):
            return {ANYWHERE}
    return set()


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs among the arguments of a higher-order operator's node."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    attributes = [getattr(owner, name, None) for name in names]
    return [module for module in attributes if isinstance(module, fx.GraphModule)]


def _written_by(node: fx.Node) -> set[int]:
    if node.op in ("placeholder", "get_attr", "output"):
        return set()
    inputs = {n: value(n) for n in node.all_input_nodes if not _is_context(n)}
    if node.op == "call_module" or any(example is None for example in inputs.values()):
        return {ANYWHERE}
    tensors = [x for x in pytree.tree_leaves([*inputs.values()]) if isinstance(x, Tensor)]
    if not tensors:
        return set()
    mode: Any = fake_mode_of(map(_innermost, tensors))
    are_plain = all(map(is_plain, tensors))
    if are_plain and not isinstance(mode, FakeTensorMode):
        mode = FakeTensorMode()
    # Other functions, and subclasses of Tensor, may do something else in the next graph.
    call = _call_key(node, inputs) if are_plain and _is_torch_function(node, inputs) else None
    if call is not None and call in _calls:
        positions = _calls[call]
    else:
        positions = _run(node, inputs, mode)
        if call is not None:
            _calls[call] = positions
    nodes = [*inputs]
    return {ANYWHERE} if positions is None else memory(nodes[position] for position in positions)


def _is_torch_function(node: fx.Node, inputs: Mapping[fx.Node, Any]) -> bool:
    """Return whether a node calls a function of PyTorch with tensors and constants alone."""
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
    """Return whether a node without an example value enters a context, such as autocast.

    No tensor enters such a node. Any other node without an example value may be a tensor.
    """
    return node.op == "call_function" and not node.all_input_nodes and value(node) is None


def _call_key(node: fx.Node, inputs: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """Return the cache key of a node's call: equal where only data and sizes of inputs differ."""
    keys = [pytree.tree_map(_input_key, example) for example in inputs.values()]
    names = {n: f"{position}{keys[position]}" for position, n in enumerate(inputs)}
    return node.op, node.target, repr(fx.map_arg((node.args, node.kwargs), names.get))


def _input_key(example: Any) -> Any:
    """Return what the key of a call has of an input."""
    if isinstance(example, Tensor):
        sizes = [min(size, 2) if type(size) is int else _input_key(size) for size in example.shape]
        return sizes, example.dtype, example.device
    return type(example) if type(example) in _SYMBOLS else example


def _run(node: fx.Node, inputs: Mapping[fx.Node, Any], mode: Any) -> _Positions:
    """Run the call of `node` on copies of its inputs that have no data.

    Without autocast first, and if that fails under autocast: tensors of several dtypes, which a
    model's autocast casts to one, can be combined only there.
    """
    leaves = pytree.tree_leaves([*inputs.values()])
    device = next(x.device.type for x in leaves if isinstance(x, Tensor))
    if not torch.amp.is_autocast_available(device):
        return _run_within(contextlib.nullcontext(), node, inputs, mode)
    positions = None
    for enabled in (False, True):
        if positions is None:
            autocast = torch.autocast(device, torch.bfloat16, enabled)
            positions = _run_within(autocast, node, inputs, mode)
    return positions


def _run_within(
    autocast: contextlib.AbstractContextManager[Any],
    node: fx.Node, inputs: Mapping[fx.Node, Any], mode: Any,
) -> _Positions:  # fmt: skip
    recorder = _WriteRecorder()
    try:
        with autocast, _tracing(mode):
            copies = [pytree.tree_map(_empty_copy, example) for example in inputs.values()]
            copy_of = dict(zip(inputs, copies, strict=True))
            with recorder:
                replay(node, *fx.map_arg((node.args, node.kwargs), copy_of.get))
    except Exception:
        # A call that returns a number from data, such as `item`, fails on fake tensors. It failed
        # at its end, so that all its writes are recorded.
        if not recorder.reads_data or not isinstance(value(node), NUMBERS):
            return None
    keys = memory(recorder.written)
    positions = [
        position
        for position, copy in enumerate(copies)
        if memory([copy]) & keys or any(map(_is_detached, pytree.tree_leaves(copy)))
    ]
    return None if ANYWHERE in keys else positions


class _WriteRecorder(TorchDispatchMode):
    """Records the tensors that operators write to, according to their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.reads_data = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.reads_data = torch.Tag.data_dependent_output in func.tags
        for i, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                self.written.append(args[i] if i < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    """Run operators as a tracer does, without gradients.

    The schema of batch_norm does not say that it writes its running statistics. Under the python
    dispatcher it is decomposed into operators whose schemas do.
    """
    shapes = getattr(mode, "shape_env", None)
    fresh = contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    with mode, fresh, torch.inference_mode(False), torch.no_grad(), enable_python_dispatcher():
        yield


def _innermost(tensor: Tensor) -> Tensor:
    """Return a plain tensor within wrappers: of transforms, or the first within subclasses."""
    tensor = unwrapped(tensor)
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = unwrapped(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
    return tensor


def _empty_copy(known: Any) -> Any:
    """Return an empty tensor like `known`, which requires a gradient, so that `detach_` shows."""
    if not isinstance(known, Tensor):
        return known
    if not is_plain(unwrapped(known)):
        # A subclass, such as DTensor, may have more than a layout: it is copied as it is.
        return known.detach()
    options: dict[str, Any] = {"dtype": known.dtype, "device": known.device}
    copy = torch.empty_strided(known.shape, known.stride(), **options)
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
