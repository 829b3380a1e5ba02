"""Attention that is written out runs in flex_attention where scaled_dot_product_attention differs.

Written out it holds all scores in memory, several times over. What remains after the rewrite
"attention" has one of these:

- A soft cap replaces the scores s by cap * tanh(s / cap), as in Gemma 2.
- A sink is a learned number for each head, the score of one more key, whose value is 0. It is
  dropped after the softmax, as in GPT-OSS. With lse the logarithm of the sum of the exponentials of
  a row's scores, the weights are those without a sink times exp(lse) / (exp(lse) + exp(sink)), so
  that the output is multiplied by sigmoid(lse - sink). All gradients follow.
- A query may see no key, as in a batch with padding.

A query that sees no key gets 0 from flex_attention. So it does from code with sinks, where the sink
takes all weight. Without sinks it gets the mean of all values from a mask that adds a finite
number, as those of transformers do, and so it does here (`mask.unseen`); a mask of minus infinity
gives NaN, and attention is left unless every query is proved to see a key.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..engine.canonical import canonical, value
from ..engine.emitter import Emitter
from ..engine.graph_state import GraphState
from ..engine.report import Report
from ..engine.rewrite import Refused, replace
from . import flex_attention, masked_attention
from .attention import Place, States, replace_places, scores
from .block_masks import BlockMaskNodes, BlockMasks, emitted
from .mask.algebra import Condition, leaves, number
from .mask.scopes import Scope
from .masked_attention import erase_read, grouped, unsupported, visible_past
from .sdpa import as_root, operands, sees_a_key
from .unfused_attention import UnfusedAttention, unfused_attentions

OP = "eager_attention"


def rewrite(graph: fx.Graph, report: Report) -> None:
    lowered = functools.partial(_lowered, BlockMasks())
    replace_places(graph, report, OP, functools.partial(_places, report), lowered, data=True)


def _places(report: Report, scope: Scope, state: GraphState) -> Iterator[Place]:
    # The rewrite "attention" reports what only comes near.
    for node, found in unfused_attentions(OP, report, scope, state, reports=False):
        if value(node).device.type in masked_attention.DEVICES:
            report.superseded(node)
            yield node, found


def _lowered(made: BlockMasks, found: UnfusedAttention, scope: Scope, states: States) -> fx.Node:
    """Replace one place; returns the call of flex_attention."""
    root, state = found.root, states[scope.graph]
    arguments = dict(zip(("query", "key", "value"), operands(found, state), strict=True))
    if reason := unsupported(root, arguments):
        raise Refused(reason)
    condition = visible_past(found.masks, scope, states, scores(arguments))
    emit = Emitter(root, value(root))
    taken = grouped(emit, root, arguments)
    block_mask = _block_mask(found, condition, scope, made, arguments)
    call = flex_attention.attend(emit, root, taken, found.scale, block_mask, found.softcap)
    result = emit(operator.getitem, call, 0)
    if found.sinks is not None:
        result = _with_sinks(emit, call, result, found.sinks)
    replace([(root, as_root(result, found.back, root, state))], found.nodes, state)
    erase_read(arguments, found.masks, scope)
    return call


def _may_give_means(
    found: UnfusedAttention, condition: Condition, scope: Scope, shape: Any
) -> bool:
    """Whether a query may see no key, so that the code gives it the mean of all values.

    Raises:
        Refused: the code may give it something else.
    """
    if found.sinks is not None or sees_a_key(condition, shape):
        return False
    if len(found.masks) > 1 or found.masks[0].visible is not None:
        raise Refused("a query may see no key, and its mask is not one that is added")
    source = found.masks[0].tensor.source
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
    arguments: dict[str, Any],
) -> BlockMaskNodes:  # fmt: skip
    shape = scores(arguments)
    means = _may_give_means(found, condition, scope, shape)
    if len(found.masks) == 1:
        return made.of(condition, found.masks[0].tensor.source, scope, shape, means)
    emit = Emitter(found.root, value(found.root))
    query, key = arguments["query"], arguments["key"]
    sizes = {axis: emit.size(query, axis) for axis in (-4, -3, -2)} | {-1: emit.size(key, -2)}
    return emitted(emit, condition, sizes, scope, value(found.root).device)


def _with_sinks(emit: Emitter, call: fx.Node, result: fx.Node, sinks: fx.Node) -> fx.Node:
    """The output times sigmoid(lse - sink), in the dtype of lse, rounded once."""
    dtype = value(result).dtype
    lse = emit(operator.mul, emit(operator.getitem, call, 1), math.log(2))
    share = emit(operator.sub, lse, emit(torch.Tensor.view, sinks, (-1, 1)))
    share = emit(torch.unsqueeze, emit(torch.sigmoid, share), -1)
    return emit(torch.Tensor.to, emit(operator.mul, result, share), dtype)
