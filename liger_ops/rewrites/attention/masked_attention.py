"""Attention with a mask, a soft cap or sinks runs in flex_attention.

A dense mask costs its memory and a slower kernel: scaled_dot_product_attention with a mask computes
every block of scores. flex_attention computes only the blocks in which something is visible. The
mask's function is read from the graph (`masks`): causal, sliding windows, chunks, padding, packed
documents, and any condition on indices and on tensors that are read per token. The block mask is
computed in the graph, once for all layers that share a mask, and without a dense mask in memory.

The rewrite "masked_attention" replaces calls of scaled_dot_product_attention. Attention that is
written out holds all scores in memory, several times over. What remains of it after the rewrite
"attention" has one of these, and is replaced by the rewrite "eager_attention":

- A soft cap replaces the scores s by cap * tanh(s / cap), as in Gemma 2.
- A sink is a learned number for each head, the score of one more key, whose value is 0. It is
  dropped after the softmax, as in GPT-OSS. With lse the logarithm of the sum of the exponentials of
  a row's scores, the weights are those without a sink times exp(lse) / (exp(lse) + exp(sink)), so
  that the output is multiplied by sigmoid(lse - sink). All gradients follow.
- A query may see no key, as in a batch with padding.

A query that sees no key gets 0 from flex_attention, and no gradient. So it does from calls with a
boolean mask, and from code with sinks, where the sink takes all weight. From a mask that adds a
finite number, as those of transformers do, it gets the mean of all values. Where it is written out,
it does so here too (`mask.unseen`); a call is left unless every query is proved to see a key, and
so is code with a mask of minus infinity, which gives NaN.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..engine.canonical import canonical, same, value
from ..engine.emitter import Emitter
from ..engine.graph_state import GraphState, erase_unused
from ..engine.report import Report
from ..engine.rewrite import Refused, replace, viewed
from . import flash_attention, flex_attention
from .attention import Place, mask_of, masked_calls, obstacle, replace_places
from .attention_products import Operand
from .block_masks import BlockMaskNodes, BlockMasks, emitted
from .grouped_attention import FLASH_DTYPES, FLASH_HEAD_DIM, HEADS, repeated
from .mask.algebra import Condition, data_of, is_condition, leaves, number
from .mask.blocks import dense_datum
from .mask.proof import sees_a_key, window
from .mask.scopes import Scope
from .masks import Mask, States, visible_past
from .numbers import scale_of_call
from .sdpa import LOWEST_FILL, as_root, operands
from .unfused_attention import UnfusedAttention, unfused_attentions

OP = "masked_attention"
UNFUSED = "eager_attention"
# Devices on which flex_attention has a fast kernel, forward and backward.
DEVICES = ("cuda",)
LEAST_HEAD_DIM = 16
# Forward and backward on an H100, 16 heads of 128 and 8 of keys, a quarter padding, ms by
# flex_attention (compiled with symbolic sizes) and by scaled_dot_product_attention with the mask:
# 4 x 4096 tokens 3.69 and 6.72, 16 x 512 1.27 and 0.82, 32 x 256 0.78 and 0.72.
LEAST_KEYS = 1024

# Queries, keys and values, each a node.
Operands = Sequence[fx.Node]


def rewrite(graph: fx.Graph, report: Report) -> None:
    made = BlockMasks()

    def lowered(found: tuple[fx.Node, dict[str, Any]], scope: Scope, states: States) -> fx.Node:
        node, arguments = found
        if reason := obstacle(node, arguments, states[scope.graph]):
            raise Refused(reason)
        attention = _of_call(node, arguments)
        given = [attention.query.source, attention.key.source, attention.value.source]
        new = _lowered(made, attention, given, scope, states)
        report.superseded(node)
        return new

    places = functools.partial(masked_calls, OP, report, DEVICES)
    replace_places(graph, report, OP, places, lowered, data=True)


def rewrite_unfused(graph: fx.Graph, report: Report) -> None:
    made = BlockMasks()

    def places(scope: Scope, state: GraphState) -> Iterator[Place]:
        # The rewrite "attention" reports what only comes near.
        for node, found in unfused_attentions(UNFUSED, report, scope, state, reports=False):
            if value(node).device.type in DEVICES:
                report.superseded(node)
                yield node, found

    def lowered(found: UnfusedAttention, scope: Scope, states: States) -> fx.Node:
        return _lowered(made, found, operands(found, states[scope.graph]), scope, states)

    replace_places(graph, report, UNFUSED, places, lowered, data=True)


def _of_call(node: fx.Node, arguments: dict[str, Any]) -> UnfusedAttention:
    """What a call of scaled_dot_product_attention computes."""
    head_dim = value(arguments["query"]).shape[-1]
    if not isinstance(head_dim, int):
        raise Refused("the size of its heads is not fixed")
    scale = scale_of_call(arguments.get("scale"), head_dim)
    assert scale is not None
    query, key, values = (Operand(arguments[name]) for name in ("query", "key", "value"))
    mask = mask_of(arguments)
    return UnfusedAttention(
        node, query, key, values, scale, None, (mask,), None, (), frozenset({node})
    )


def _lowered(
    made: BlockMasks, found: UnfusedAttention, given: Operands,
    scope: Scope, states: States,
) -> fx.Node:  # fmt: skip
    """Replace one place; returns the call of the engine."""
    root, state = found.root, states[scope.graph]
    if reason := unsupported(root, given):
        raise Refused(reason)
    shape = (*value(given[0]).shape[:-1], value(given[1]).shape[-2])
    condition = _condition(found, scope, states, shape)
    means = _may_give_means(found, condition, scope, shape)
    emit = Emitter(root, value(root))
    taken = grouped(emit, root, given)
    is_plain = found.softcap is None and found.sinks is None and not data_of(condition)
    size = window(condition, shape) if is_plain else None
    if size is not None and flash_attention.is_faster(*map(value, taken)):
        tokens = [emit.size(operand, -2) for operand in taken[:2]]
        call = result = flash_attention.attend(emit, taken, tokens, found.scale, size)
    else:
        block_mask = _block_mask(found, condition, scope, made, given, means)
        call = flex_attention.attend(emit, root, taken, found.scale, block_mask, found.softcap)
        result = emit(operator.getitem, call, 0)
        if found.sinks is not None:
            lse = emit(operator.mul, emit(operator.getitem, call, 1), math.log(2))
            dtype = value(result).dtype
            result = flex_attention.with_sinks(emit, result, lse, found.sinks, dtype)
    replace([(root, as_root(result, found.back, root, state))], found.nodes, state)
    _erase_read(given, found.masks, scope)
    return call


def _condition(
    found: UnfusedAttention, scope: Scope, states: States, shape: tuple[Any, ...]
) -> Condition:
    """When a query sees a key past all masks, as a function that a block mask can read."""
    for mask in found.masks:
        if value(mask.source).requires_grad:
            raise Refused("its mask has a gradient")
        if mask.fill is not None and not mask.fill <= LOWEST_FILL:
            raise Refused(f"it fills hidden scores with {mask.fill}, which is not low enough")
    condition = visible_past(found.masks, scope, states, shape)
    if (datum := dense_datum(data_of(condition))) is not None:
        raise Refused(f"its mask reads {datum.node.name} for each query and key, a dense tensor")
    if found.is_call and isinstance(condition, bool):
        raise Refused("its mask is the same everywhere")
    return condition


def _may_give_means(
    found: UnfusedAttention, condition: Condition, scope: Scope, shape: tuple[Any, ...]
) -> bool:
    """Whether a query may see no key, so that the code gives it the mean of all values.

    Raises:
        Refused: the code may give it something else.
    """
    if found.sinks is not None or sees_a_key(condition, shape):
        return False
    source = found.masks[0].source
    if found.is_call:
        if is_condition(scope.functions.value(source)):
            return False
        raise Refused("its mask adds numbers, and a query that sees no key would get another value")
    if len(found.masks) > 1 or found.masks[0].visible is not None:
        raise Refused("a query may see no key, and its mask is not one that is added")
    numbers = {leaf.constant for leaf in leaves(number(scope.functions.value(source)))}
    low = min(map(float, numbers))
    if len(numbers - {0.0}) > 1 or not _holds(found, source, low):
        raise Refused("a query may see no key, and its scores are not the same finite number")
    return True


def _holds(found: UnfusedAttention, mask: fx.Node, low: float) -> bool:
    """Whether a number of the mask stays finite on the way to the softmax, and in it."""
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        dtype = getattr(value(node), "dtype", torch.int64)
        if dtype.is_floating_point and abs(low) > torch.finfo(dtype).max:
            return False
        call = canonical(node)
        if node is mask or call is None or call.op != "softmax":
            waiting += [user for user in node.users if user in found.nodes]
    return True


def _block_mask(
    found: UnfusedAttention, condition: Condition, scope: Scope, made: BlockMasks,
    given: Operands, means: bool,
) -> BlockMaskNodes:  # fmt: skip
    emit = Emitter(found.root, value(found.root))
    query, key, _ = given
    shape = (*value(query).shape[:-1], value(key).shape[-2])
    if len(found.masks) == 1:
        return made.of(condition, found.masks[0].source, scope, shape, means)
    sizes = {axis: emit.size(query, axis) for axis in (-4, -3, -2)} | {-1: emit.size(key, -2)}
    return emitted(emit, condition, sizes, scope, value(found.root).device)


def _erase_read(given: Operands, masks: Iterable[Mask], scope: Scope) -> None:
    """Erase the masks and the repeated heads that nothing else uses."""
    for one in given[1:]:
        if (repeat := repeated(one, HEADS)) is not None:
            erase_unused(one, repeat.nodes)
    for mask in masks:
        erase_unused(mask.source, set(scope.functions.nodes_read(mask.source)))


def unsupported(node: fx.Node, given: Operands) -> str | None:
    """Why flex_attention does not run these tensors, or not fast; None if it does."""
    query, key, values = map(value, given)
    if not query.dim() == key.dim() == values.dim() == 4:
        return "flex_attention takes tensors of 4 dimensions"
    if not same(query.shape[0], key.shape[0]) or not same(query.shape[0], values.shape[0]):
        return "its queries and keys are broadcast against each other"
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
        if _expected(size) < LEAST_KEYS:
            return f"below {LEAST_KEYS} tokens scaled_dot_product_attention is as fast"
    return None


def _expected(size: Any) -> int:
    """A size, or the one that was traced if it is symbolic. Adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def grouped(emit: Emitter, node: fx.Node, given: Operands) -> tuple[Any, Any, Any]:
    """The queries, keys and values without repeated heads, in the dtype of the result.

    Under autocast the result is in its dtype, and the operands may not be.
    """
    query, *others = given
    repeats = [repeat for one in others if (repeat := repeated(one, HEADS)) is not None]
    if len(repeats) == 2 and repeats[0].times == repeats[1].times:
        others = [viewed(node, repeat.source, repeat.swaps) for repeat in repeats]
    dtype = value(node).dtype
    query, key, values = (
        one if value(one).dtype == dtype else emit(torch.Tensor.to, one, dtype)
        for one in (query, *others)
    )
    return query, key, values
