"""Replace attention with a mask, a soft cap or sinks by flex_attention.

A dense mask costs its memory and a slower kernel: scaled_dot_product_attention with a mask computes
every block of scores. flex_attention computes only the blocks in which something is visible. The
mask's function is read from the graph (`masks`): causal, sliding windows, chunks, padding, packed
documents, and any condition on indices and on tensors that are read per token. The block mask is
computed in the graph, once for all layers that share a mask, and without a dense mask in memory.

The rewrite "masked_attention" replaces calls of scaled_dot_product_attention. Attention that is
written out holds all scores in memory, several times over. Where the rewrite "attention" left it,
it has one of these, and the rewrite "eager_attention" replaces it:

- A soft cap replaces the scores s by cap * tanh(s / cap), as in Gemma 2.
- A sink is a learned number for each head, the score of one more key, whose value is 0. It is
  dropped after the softmax, as in GPT-OSS. With lse the logarithm of the sum of the exponentials of
  a row's scores, the weights are those without a sink times exp(lse) / (exp(lse) + exp(sink)), so
  that the output is multiplied by sigmoid(lse - sink). All gradients follow.
- A query may see no key, as in a batch with padding.

A query that sees no key gets 0 from flex_attention, and no gradient. It gets the same from calls
with a boolean mask, and from code with sinks, where the sink takes all weight. From a mask that
adds a finite number, as those of transformers do, it gets the mean of all values. Attention that is
written out still gives that mean after the rewrite (`mask.unseen`); a call is left unless every
query is proved to see a key, and so is code with a mask of minus infinity, which gives NaN.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...invariant_mode import is_invariant
from ...ops.attention.documents import Documents, attend, rows
from ...ops.attention.varlen_attention import FLASH_DTYPES, FLASH_HEAD_DIM
from ..engine.canonical import canonical, same, value
from ..engine.graph_state import GraphState, erase_unused
from ..engine.insertion import Emitter, Refused, viewed
from ..engine.maps.algebra import Condition, data_of, is_condition, leaves, number
from ..engine.report import Report
from ..engine.rewrite import replace
from . import flex_attention
from .attention import (
    Candidate,
    Mask,
    States,
    attentions,
    mask_of,
    masked_calls,
    obstacle,
    replace_candidates,
    visible_past,
)
from .attention_products import Operand
from .flex_attention import BlockMaskNodes, emit_block_mask
from .grouped_attention import HEADS, repeated
from .mask.blocks import BATCH, KEYS, dense_datum
from .mask.evaluate import Scope
from .mask.proof import sees_a_key
from .mask_nodes import MaskNodes, emit_documents
from .numbers import scale_of_call
from .sdpa import LOWEST_FILL, as_root, operand_nodes
from .sight import Sight, sight
from .unfused_attention import UnfusedAttention, unfused_attentions

OP = "masked_attention"
UNFUSED = "eager_attention"
# Type of a device on which varlen_attention has an engine -> whether the engine takes soft caps,
# and flex_attention has a fast kernel there, forward and backward. Within `liger_ops.invariant`
# every device, dtype and size is rewritten, to varlen_attention alone.
DEVICES = {"cuda": True, "npu": False}
LEAST_HEAD_DIM = 16
# Forward and backward on an H100, 16 heads of 128 and 8 of keys, a quarter padding, ms by
# flex_attention (compiled with symbolic sizes) and by scaled_dot_product_attention with the mask:
# 4 x 4096 tokens 3.69 and 6.72, 16 x 512 1.27 and 0.82, 32 x 256 0.78 and 0.72.
LEAST_KEYS = 1024

# Queries, keys and values, each a node.
Operands = Sequence[fx.Node]


def rewrite(graph: fx.Graph, report: Report) -> None:
    mask_nodes = MaskNodes()

    def replacement(call: tuple[fx.Node, dict[str, Any]], scope: Scope, states: States) -> fx.Node:
        node, arguments = call
        if reason := obstacle(node, arguments, states[scope.graph]):
            raise Refused(reason)
        attention = _attention_of_call(node, arguments)
        operands = [attention.query.source, attention.key.source, attention.value.source]
        new = _replacement(mask_nodes, attention, operands, scope, states)
        report.superseded(node)
        return new

    candidates = functools.partial(masked_calls, OP, report, DEVICES)
    if is_invariant():
        candidates = functools.partial(_every_call, report)
    replace_candidates(graph, report, OP, candidates, replacement, data=True)


def _every_call(report: Report, scope: Scope, _: GraphState) -> Iterator[Candidate]:
    # Causal attention too, with repeated heads too: a gradient is summed over them in one order.
    for node, arguments in attentions(scope.graph, OP, report):
        if arguments["attn_mask"] is not None or arguments["is_causal"] is True:
            yield node, (node, arguments)


def rewrite_unfused(graph: fx.Graph, report: Report) -> None:
    mask_nodes = MaskNodes()

    def candidates(scope: Scope, state: GraphState) -> Iterator[Candidate]:
        # The rewrite "attention" reports what only comes near.
        for node, attention in unfused_attentions(UNFUSED, report, scope, state, reports=False):
            if is_invariant() or value(node).device.type in DEVICES:
                report.superseded(node)
                yield node, attention

    def replacement(attention: UnfusedAttention, scope: Scope, states: States) -> fx.Node:
        return _replacement(
            mask_nodes, attention, operand_nodes(attention, states[scope.graph]), scope, states
        )

    replace_candidates(graph, report, UNFUSED, candidates, replacement, data=True)


def _attention_of_call(node: fx.Node, arguments: dict[str, Any]) -> UnfusedAttention:
    """Return a call of scaled_dot_product_attention as the attention that it computes."""
    head_dim = value(arguments["query"]).shape[-1]
    if not isinstance(head_dim, int):
        raise Refused("the size of its heads is not fixed")
    scale = scale_of_call(arguments.get("scale"), head_dim)
    assert scale is not None
    query, key, values = (Operand(arguments[name]) for name in ("query", "key", "value"))
    masks = () if arguments["attn_mask"] is None else (mask_of(arguments),)
    return UnfusedAttention(
        node, query, key, values, scale, None, masks, None, (), frozenset({node})
    )


def _replacement(
    mask_nodes: MaskNodes, attention: UnfusedAttention, operands: Operands,
    scope: Scope, states: States,
) -> fx.Node:  # fmt: skip
    """Replace attention by flash attention or flex_attention, and return the call."""
    root, state = attention.root, states[scope.graph]
    if reason := unsupported(root, operands):
        raise Refused(reason)
    device = value(root).device.type
    takes_blocks = not is_invariant() and DEVICES[device]
    if attention.softcap is not None and not takes_blocks and not is_invariant():
        raise Refused(f"it has a soft cap, which the engine on {device} does not take")
    shape = (*value(operands[0]).shape[:-1], value(operands[1]).shape[-2])
    is_causal = attention.is_call and not attention.masks
    condition = True if is_causal else _condition(attention, scope, states, shape)
    shows_unseen = not is_causal and _shows_unseen(attention, condition, scope, shape)
    emit = Emitter(root, value(root))
    qkv = grouped(emit, root, operands)
    seen = None
    if same(shape[-2], shape[-1]):
        seen = Sight(-1, True, False) if is_causal else sight(condition, shape, scope)
    if seen is not None and not shows_unseen:
        batch, length = emit.size(operands[0], 0), emit.size(operands[0], -2)
        documents = _documents(attention, seen, scope, mask_nodes, operands)
        options = (attention.scale, attention.softcap, attention.sinks)
        by_token = attend(emit, qkv, documents, batch, length, *options)
        call = result = emit(torch.transpose, by_token, 1, 2)
    elif not takes_blocks:
        raise Refused("its mask is not one of padding, causal windows and packed documents")
    else:
        block_mask = _block_mask(attention, condition, scope, mask_nodes, operands, shows_unseen)
        call = flex_attention.attend(
            emit, root, qkv, attention.scale, block_mask, attention.softcap
        )
        result = emit(operator.getitem, call, 0)
        if attention.sinks is not None:
            # The operator returns its logarithms to the base 2.
            lse = emit(operator.mul, emit(operator.getitem, call, 1), math.log(2))
            dtype = value(result).dtype
            result = flex_attention.with_sinks(emit, result, lse, attention.sinks, dtype)
    replace([(root, as_root(result, attention.back, root, state))], attention.nodes, state)
    _erase_unused_operands(operands, attention.masks, scope)
    return call


def _condition(
    attention: UnfusedAttention, scope: Scope, states: States, shape: tuple[Any, ...]
) -> Condition:
    """Return the condition that a query sees a key past all masks, which a block mask can hold.

    Raises:
        Refused: a mask has a gradient, a fill that is not low enough, or reads a dense tensor; the
            condition is unknown; or the mask of a call hides everything or nothing.
    """
    for mask in attention.masks:
        if value(mask.source).requires_grad:
            raise Refused("its mask has a gradient")
        if mask.fill is not None and not mask.fill <= LOWEST_FILL:
            raise Refused(f"it fills hidden scores with {mask.fill}, which is not low enough")
    condition = visible_past(attention.masks, scope, states, shape)
    if (datum := dense_datum(data_of(condition))) is not None:
        raise Refused(f"its mask reads {datum.node.name} for each query and key, a dense tensor")
    if attention.is_call and isinstance(condition, bool):
        raise Refused("its mask is the same everywhere")
    return condition


def _shows_unseen(
    attention: UnfusedAttention, condition: Condition, scope: Scope, shape: tuple[Any, ...]
) -> bool:
    """Return whether a query may see no key, so that the code gives it the mean of all values.

    Raises:
        Refused: the code may give it something else.
    """
    if attention.sinks is not None or sees_a_key(condition, shape):
        return False
    source = attention.masks[0].source
    if attention.is_call:
        # With a boolean mask the call gives 0, as flex_attention does.
        if is_condition(scope.functions.value(source)):
            return False
        raise Refused("its mask adds numbers, and a query that sees no key would get another value")
    if len(attention.masks) > 1 or attention.masks[0].visible is not None:
        raise Refused("a query may see no key, and its mask is not one that is added")
    # The mean needs one finite number for all hidden keys: with two, the lower ones get no weight.
    numbers = {leaf.constant for leaf in leaves(number(scope.functions.value(source)))}
    low = min(map(float, numbers))
    if len(numbers - {0.0}) > 1 or not _stays_finite(attention, source, low):
        raise Refused("a query may see no key, and its scores are not the same finite number")
    return True


def _stays_finite(attention: UnfusedAttention, mask: fx.Node, low: float) -> bool:
    """Return whether a number of the mask stays finite on the way to the softmax, and in it."""
    pending = [mask]
    while pending:
        node = pending.pop()
        dtype = getattr(value(node), "dtype", torch.int64)
        if dtype.is_floating_point and abs(low) > torch.finfo(dtype).max:
            return False
        call = canonical(node)
        if node is mask or call is None or call.op != "softmax":
            pending += [user for user in node.users if user in attention.nodes]
    return True


def _block_mask(
    attention: UnfusedAttention, condition: Condition, scope: Scope, mask_nodes: MaskNodes,
    operands: Operands, shows_unseen: bool,
) -> BlockMaskNodes:  # fmt: skip
    """Return the block mask: after a single mask, shared by layers, or else before the root."""
    emit = Emitter(attention.root, value(attention.root))
    query, key, _ = operands
    shape = (*value(query).shape[:-1], value(key).shape[-2])
    if len(attention.masks) == 1:
        return mask_nodes.block_mask(
            condition, attention.masks[0].source, scope, shape, shows_unseen
        )
    sizes = {axis: emit.size(query, axis) for axis in (-4, -3, -2)} | {-1: emit.size(key, -2)}
    return emit_block_mask(emit, condition, sizes, scope, value(attention.root).device)


def _documents(
    attention: UnfusedAttention, seen: Sight, scope: Scope,
    mask_nodes: MaskNodes, operands: Operands,
) -> Documents:  # fmt: skip
    """Return the documents of a batch."""
    emit = Emitter(attention.root, value(attention.root))
    query, key, _ = operands
    if seen.of_tokens is True and not seen.is_packed:
        sizes, device = (emit.size(query, 0), emit.size(key, -2)), value(query).device
        documents = rows(emit, *sizes, device)
    elif len(attention.masks) == 1:
        shape = (*value(query).shape[:-1], value(key).shape[-2])
        documents = mask_nodes.documents(seen, attention.masks[0].source, scope, shape)
    else:
        sizes_by_axis = {BATCH: emit.size(query, 0), KEYS: emit.size(key, -2)}
        device = value(query).device
        documents = emit_documents(emit, seen, sizes_by_axis, scope, device)
    return documents._replace(window_left=seen.window_left)


def _erase_unused_operands(operands: Operands, masks: Iterable[Mask], scope: Scope) -> None:
    """Erase the masks and the repeated heads that nothing else uses."""
    for operand in operands[1:]:
        if (repeat := repeated(operand, HEADS)) is not None:
            erase_unused(operand, repeat.nodes)
    for mask in masks:
        erase_unused(mask.source, set(scope.functions.nodes_read(mask.source)))


def unsupported(node: fx.Node, operands: Operands) -> str | None:
    """Return why flex_attention does not run these tensors, or not fast; None if it does."""
    query, key, values = map(value, operands)
    if not query.dim() == key.dim() == values.dim() == 4:
        return "flex_attention takes tensors of 4 dimensions"
    if not same(query.shape[0], key.shape[0]) or not same(query.shape[0], values.shape[0]):
        return "its queries and keys are broadcast against each other"
    if is_invariant():
        return None
    if value(node).dtype not in FLASH_DTYPES:
        return f"flex_attention is slow in {value(node).dtype}"
    for size in (query.shape[-1], values.shape[-1]):
        if not isinstance(size, int) or not LEAST_HEAD_DIM <= size <= FLASH_HEAD_DIM:
            return f"flex_attention takes heads of {LEAST_HEAD_DIM} to {FLASH_HEAD_DIM} numbers"
    if not all(isinstance(tensor.shape[HEADS], int) for tensor in (query, key, values)):
        return "its number of heads is not fixed"
    if query.is_cuda and (reason := flex_attention.obstacle(query.device)):
        return reason
    for size in (query.shape[-2], key.shape[-2]):
        if _expected_size(size) < LEAST_KEYS:
            return f"below {LEAST_KEYS} tokens scaled_dot_product_attention is as fast"
    return None


def _expected_size(size: Any) -> int:
    """Return a size, or its value in the traced batch if it is symbolic. Adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def grouped(emit: Emitter, node: fx.Node, operands: Operands) -> tuple[Any, Any, Any]:
    """Return queries, keys and values without repeated heads, in the dtype of the result.

    Under autocast the result is in autocast's dtype, and the operands may be in another.
    """
    query, *keys_and_values = operands
    repeats = [
        repeat for operand in keys_and_values if (repeat := repeated(operand, HEADS)) is not None
    ]
    if len(repeats) == 2 and repeats[0].times == repeats[1].times:
        keys_and_values = [viewed(node, repeat.source, repeat.views) for repeat in repeats]
    dtype = value(node).dtype
    query, key, values = (
        operand if value(operand).dtype == dtype else emit(torch.Tensor.to, operand, dtype)
        for operand in (query, *keys_and_values)
    )
    return query, key, values
