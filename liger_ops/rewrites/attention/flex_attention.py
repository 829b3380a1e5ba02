"""Insert calls of the operator flex_attention, with code that `fuse` shares, and emit block masks
into a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..engine.canonical import value
from ..engine.insertion import Emitter, fake_mode_of
from ..engine.maps.algebra import Condition, axes_of, disjunction
from .mask.blocks import (
    AXES,
    BATCH,
    BLOCK,
    HEADS,
    Call,
    Visible,
    block_lists,
    is_unseen,
    read_at,
    rounded_to_zero,
    unseen_queries,
)
from .mask.evaluate import Scope
from .mask.predicate import inlined, predicate, read_tensors

# The sizes of scores by axis, each a number or a node.
ScoreSizes = Mapping[int, Any]


class BlockMaskNodes(NamedTuple):
    """The nodes of one graph that are a block mask.

    Attributes:
        lists: the tensors of a `BlockMask`, by name.
        predicate: the mask's condition as a graph of (b, h, i, j) and `data`.
        data: the tensors that the predicate reads.
        unseen: with `shows_unseen`, a boolean node (B or 1, H or 1, S or 1): the queries that see
            no key by the condition itself.
    """

    lists: Mapping[str, fx.Node]
    predicate: fx.GraphModule
    data: tuple[fx.Node, ...]
    unseen: fx.Node | None = None

    def in_scope(self, scope: Scope) -> BlockMaskNodes:
        """Return the block mask in the graph of `scope`, which is called with its nodes."""
        lists = {name: scope.inward(node) for name, node in self.lists.items()}
        unseen = None if self.unseen is None else scope.inward(self.unseen)
        data = tuple(map(scope.inward, self.data))
        return BlockMaskNodes(lists, self.predicate, data, unseen)


def emit_block_mask(
    emit: Emitter, condition: Condition, sizes: ScoreSizes, scope: Scope, device: torch.device,
    shows_unseen: bool = False,
) -> BlockMaskNodes:  # fmt: skip
    """Emit the block mask of a condition on nodes of `scope` or of scopes around it."""
    unseen = None
    if shows_unseen:
        used = {axis: sizes[axis] if axis in axes_of(condition) else 1 for axis in AXES}
        unseen = unseen_queries(emit, inlined_condition(emit, condition, scope), used, device)
        condition = disjunction(condition, is_unseen(unseen))
    # Rows of a batch, or heads, between which the mask does not differ share one list of blocks.
    shared = {axis: 1 for axis in (BATCH, HEADS) if axis not in axes_of(condition)}
    lists = block_lists(
        emit, inlined_condition(emit, condition, scope), {**sizes, **shared}, device
    )
    return BlockMaskNodes(lists, predicate(condition), _data(condition, scope), unseen)


def inlined_condition(emit: Emitter, condition: Condition, scope: Scope) -> Visible:
    """Return the condition as a function of nodes of the indices, which emits it in the graph."""
    module, data = predicate(condition), _data(condition, scope)
    return lambda *indices: inlined(emit, module.graph, *indices, *data)


def _data(condition: Condition, scope: Scope) -> tuple[fx.Node, ...]:
    return tuple(map(scope.inward, read_tensors(condition)))


def attend(
    emit: Emitter, node: fx.Node, operands: tuple[Any, Any, Any], scale: float,
    block_mask: BlockMaskNodes, softcap: float | None = None,
) -> fx.Node:  # fmt: skip
    """Insert the call of flex_attention that replaces `node`, and return it.

    The results of the call are the output, log2(e) * lse, and the largest scores. With a soft cap
    the scores are softcap * tanh(scale * query @ key^T / softcap). A query that is unseen in the
    block mask gets the mean of all values.
    """
    from ...torch_private import flex_attention

    query, key, _ = operands
    lengths = (emit.size(query, -2), emit.size(key, -2))
    score = _add_submodule(emit, "liger_score", _score_graph(softcap, block_mask.unseen))
    mask = _add_submodule(emit, "liger_mask", block_mask.predicate)
    block_mask_tuple = _as_tuple(block_mask.lists, lengths, mask)
    options = _kernel_options(*map(value, operands))
    scale = scale if softcap is None else scale / softcap
    unseen = () if block_mask.unseen is None else (block_mask.unseen,)
    args = (*operands, score, block_mask_tuple, scale, options, unseen, block_mask.data)
    result = _results(node, *args)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(flex_attention, args)
    call.meta.update({**node.meta, "example_value": result})
    return call


def _as_tuple(
    lists: Mapping[str, fx.Node], lengths: tuple[Any, Any], mask: fx.Node
) -> tuple[Any, ...]:
    """Return a block mask as the tuple that the operator takes in this version of PyTorch.

    `BlockMask` knows the tuple's order: one is made of stand-ins, which are replaced by identity.
    """
    from torch.nn.attention.flex_attention import BlockMask

    stand_ins: dict[str, Any] = {name: torch.empty(1, 1, 1, 1) for name in lists}
    layout = BlockMask(
        seq_lengths=(BLOCK, BLOCK), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop, **stand_ins
    ).as_tuple()
    by_identity = {id(stand_ins[name]): node for name, node in lists.items()} | {id(noop): mask}
    return (*lengths, *(by_identity.get(id(entry), entry) for entry in layout[2:]))


def noop(*indices: Tensor) -> Tensor:
    """Stand for the predicate in a block mask."""
    raise AssertionError("stands for the predicate in a block mask")


def capped(score: Any, softcap: float) -> Any:
    """Return softcap * tanh(score), for a score that was divided by its soft cap.

    A GPU computes sigmoid faster than tanh: 2 x 4096 tokens, 8 heads of 256 and 4 of keys take 4.3
    ms forward and backward instead of 5.1 on an H200. The result differs by softcap * 1e-7.
    """
    return torch.sigmoid(score * 2) * (2 * softcap) - softcap


def score_of(score: Any, softcap: float | None, is_unseen: Any) -> Any:
    """Return the score, or softcap * tanh(score); rounded to 0 where `is_unseen` is true."""
    if softcap is not None:
        score = capped(score, softcap)
    return score if is_unseen is None else rounded_to_zero(score, is_unseen)


def with_sinks(call: Call, y: Any, lse: Any, sinks: Any, dtype: torch.dtype) -> Any:
    """Return the output times sigmoid(lse - sink), in the dtype of lse, rounded once to `dtype`.

    A sink adds exp(sink) to the sum of the softmax, and nothing to the numerator.
    """
    kept_share = call(
        torch.sigmoid, call(operator.sub, lse, call(torch.Tensor.view, sinks, (-1, 1)))
    )
    return call(
        torch.Tensor.to, call(operator.mul, y, call(torch.unsqueeze, kept_share, -1)), dtype
    )


def _score_graph(softcap: float | None, unseen: fx.Node | None = None) -> fx.GraphModule:
    """Return `score_of` as the graph of a score at (b, h, i, j) that flex_attention calls."""
    graph = fx.Graph()
    names = ("score", "b", "h", "i", "j", *(() if unseen is None else ("unseen",)))
    score, b, h, i, _, *unseen_nodes = (fx.Proxy(graph.placeholder(name)) for name in names)
    is_unseen = None if unseen is None else read_at(unseen_nodes[0], (b, h, i), value(unseen))
    graph.output(score_of(score, softcap, is_unseen).node)
    return fx.GraphModule(torch.nn.Module(), graph)


def _add_submodule(emit: Emitter, name: str, module: fx.GraphModule) -> fx.Node:
    """Add a module to the graph's, under `name` with a number, and return a node that reads it."""
    owner: Any = emit.before.graph.owning_module
    count = sum(child.startswith(name) for child, _ in owner.named_children())
    owner.add_submodule(f"{name}_{count}", module)
    with emit.before.graph.inserting_before(emit.before):
        return emit.before.graph.get_attr(f"{name}_{count}")


def obstacle(device: torch.device | None = None) -> str | None:
    """Return why a GPU does not run flex_attention fast, or None."""
    if torch.version.hip is not None:
        return "flex_attention has not been measured on AMD's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flex_attention needs compute capability 8.0"
    return None


def kernel_options(query: Tensor) -> dict[str, Any]:
    """Return options of flex_attention's kernels that are faster than its defaults.

    While Dynamo traces, the type of GPU is a constant.
    """
    if not query.is_cuda or not _is_hopper(query.device.index):
        return {}
    if query.shape[-1] == 64 and query.dtype in (torch.bfloat16, torch.float16):
        # Instead of tiles of 128 x 128 in 4 warps. 16 x 1219 tokens, 32 heads and 8 of keys, causal
        # with padding: the forward takes 0.57 ms instead of 5.18 on an H200.
        return {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4}
    if query.shape[-1] in (192, 256):
        # 8 warps instead of 4. The backward on an H200: 2 x 4096 tokens, 8 heads of 256 and 4 of
        # keys, causal with a soft cap, 2.5 ms instead of 3.4; 4 x 2048 tokens, 16 heads of 192 and
        # of 128 for the values, causal, 1.6 instead of 1.8.
        return {"bwd_num_warps": 8}
    return {}


@torch.compiler.assume_constant_result
def _is_hopper(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _kernel_options(query: Tensor, key: Tensor, values: Tensor) -> dict[str, Any]:
    """Return `kernel_options` and the options that flex_attention() itself sets."""
    from torch.nn.attention.flex_attention import AuxRequest

    from ...torch_private import apply_kernel_options

    defaults: Any = kernel_options(query)
    return dict(apply_kernel_options(query, key, values, False, defaults, AuxRequest(lse=True)))


def _results(node: fx.Node, *arguments: Any) -> tuple[Tensor, ...]:
    """Return fake results of flex_attention: the output, lse and the largest scores."""
    from ...torch_private import flex_attention_fake_impl

    with fake_mode_of([value(node)]), torch.no_grad():
        out, *rest = flex_attention_fake_impl(*pytree.tree_map(value, arguments))
    return out.requires_grad_(value(node).requires_grad), *rest
