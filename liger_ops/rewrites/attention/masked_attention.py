"""Attention whose mask is a predicate of indices and data runs in flex_attention.

A dense mask costs its memory and a slower kernel: scaled_dot_product_attention with a mask computes
every block of scores. flex_attention computes only the blocks in which something is visible. The
mask's function is read from the graph (`mask`): causal, sliding windows, chunks, padding, packed
documents, and any condition on indices and on tensors that are read per token. The block mask is
computed in the graph, once for all layers that share a mask, and without a dense mask in memory.

A query that sees no key gets 0 from scaled_dot_product_attention with a boolean mask and from
flex_attention, and no gradient. With a mask of finite numbers that is added to the scores such a
query gets the mean of all values; attention is left unless every query is proved to see a key.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..engine.canonical import same, value
from ..engine.emitter import Emitter
from ..engine.graph_state import erase_unused
from ..engine.report import Report
from ..engine.rewrite import Refused, check_results, viewed
from . import flash_attention, flex_attention
from .attention import States, known_of, masked_calls, obstacle, replace_places, scores
from .attention_products import Operand
from .block_masks import BlockMasks
from .causal_attention import misfit, write
from .grouped_attention import FLASH_DTYPES, FLASH_HEAD_DIM, HEADS, repeated
from .mask.algebra import Condition, both, data_of, is_condition, known
from .mask.blocks import dense_datum
from .mask.proof import sees_itself, window
from .mask.scopes import Scope
from .sdpa import LOWEST_FILL, condition_of
from .unfused_attention import Mask

OP = "masked_attention"
# Devices on which flex_attention has a fast kernel, forward and backward.
DEVICES = ("cuda",)
LEAST_HEAD_DIM = 16
# Forward and backward on an H100, 16 heads of 128 and 8 of keys, a quarter padding, ms by
# flex_attention (compiled with symbolic sizes) and by scaled_dot_product_attention with the mask:
# 4 x 4096 tokens 3.69 and 6.72, 16 x 512 1.27 and 0.82, 32 x 256 0.78 and 0.72.
LEAST_KEYS = 1024


def rewrite(graph: fx.Graph, report: Report) -> None:
    lowered = functools.partial(_lowered, report, BlockMasks())
    places = functools.partial(masked_calls, OP, report, DEVICES)
    replace_places(graph, report, OP, places, lowered, data=True)


def _lowered(
    report: Report, made: BlockMasks,
    found: tuple[fx.Node, dict[str, Any]], scope: Scope, states: States,
) -> fx.Node:  # fmt: skip
    node, arguments = found
    mask, state = arguments["attn_mask"], states[scope.graph]
    reason = obstacle(node, arguments, state) or unsupported(node, arguments) or misfit(arguments)
    if reason is not None:
        raise Refused(reason)
    masks = [Mask(Operand(mask))]
    condition = visible_past(masks, scope, states, scores(arguments))
    if isinstance(condition, bool):
        raise Refused("its mask is the same everywhere")
    is_added = not is_condition(scope.functions.value(mask))
    if is_added and not sees_itself(condition, scores(arguments)):
        raise Refused("its mask adds numbers, and a query that sees no key would get another value")
    emit = Emitter(node, value(node))
    operands = grouped(emit, node, arguments)
    scale = _scale(arguments)
    size = None if data_of(condition) else window(condition, scores(arguments))
    if size is not None and flash_attention.is_faster(*map(value, operands)):
        tokens = [emit.size(operand, -2) for operand in operands[:2]]
        new = flash_attention.attend(emit, operands, tokens, scale, size)
    else:
        block_mask = made.of(condition, mask, scope, scores(arguments))
        result = flex_attention.attend(emit, node, operands, scale, block_mask)
        new = emit(operator.getitem, result, 0)
    check_results({node: value(new)}, state)
    node.replace_all_uses_with(new)
    scope.graph.erase_node(node)
    erase_read(arguments, masks, scope)
    report.superseded(node)
    return new


def visible_past(
    masks: Iterable[Mask], scope: Scope, states: States, shape: tuple[Any, ...]
) -> Condition:
    """When a query sees a key past all masks, as a function of (b, h, i, j).

    Raises:
        Refused: it is not known, or no block mask can read it.
    """
    if not known(shape[-1] >= 1):
        raise Refused("it may have no keys")
    condition: Condition = True
    for mask in masks:
        source = mask.tensor.source
        if value(source).requires_grad:
            raise Refused("its mask has a gradient")
        if mask.fill is not None and mask.fill > LOWEST_FILL:
            raise Refused(f"it fills hidden scores with {mask.fill}, which is not low enough")
        condition = both(condition, known_of(condition_of, mask, scope.functions, shape))
        if reason := write(scope.functions, source, states.values()):
            raise Refused(reason)
    if (datum := dense_datum(data_of(condition))) is not None:
        raise Refused(f"its mask reads {datum.node.name} for each query and key, a dense tensor")
    return condition


def erase_read(arguments: dict[str, Any], masks: Iterable[Mask], scope: Scope) -> None:
    """Erase the masks and the repeated heads that nothing else uses."""
    for name in ("key", "value"):
        if (repeat := repeated(arguments[name], HEADS)) is not None:
            erase_unused(arguments[name], repeat.nodes)
    for mask in masks:
        source = mask.tensor.source
        erase_unused(source, set(scope.functions.read(source)))


def _scale(arguments: dict[str, Any]) -> float:
    scale = arguments.get("scale")
    if scale is None:
        return 1.0 / math.sqrt(value(arguments["query"]).shape[-1])
    if not isinstance(scale, (int, float)):
        raise Refused("its scale is not a constant")
    return float(scale)


def unsupported(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Why flex_attention does not run these tensors, or not fast; None if it does."""
    query, key, values = (value(arguments[name]) for name in ("query", "key", "value"))
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


def grouped(emit: Emitter, node: fx.Node, arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The queries, keys and values without repeated heads, in the dtype of the result.

    Under autocast the result is in its dtype, and the operands may not be.
    """
    operands = {name: arguments[name] for name in ("query", "key", "value")}
    key, values = (repeated(operands[name], HEADS) for name in ("key", "value"))
    if key is not None and values is not None and key.times == values.times:
        for name, repeat in (("key", key), ("value", values)):
            operands[name] = viewed(node, repeat.source, repeat.swaps)
    dtype = value(node).dtype
    query, key, values = (
        one if value(one).dtype == dtype else emit(torch.Tensor.to, one, dtype)
        for one in operands.values()
    )
    return query, key, values
