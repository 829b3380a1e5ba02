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

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..engine.canonical import canonical, value
from ..engine.emitter import Emitter
from ..engine.graph_state import GraphState, erase_unused
from ..engine.report import Report
from ..engine.rewrite import Refused, attempt, replace
from . import flex_attention, masked_attention
from .attention import scores
from .block_masks import BlockMaskNodes, BlockMasks, emitted
from .causal_attention import write
from .grouped_attention import HEADS, repeated
from .mask.algebra import Condition, Unknown, both, data_of, known, leaves, number
from .mask.blocks import dense_datum
from .mask.scopes import Scope, parts, scopes
from .sdpa import LOWEST_FILL, as_root, condition_of, operands, sees_a_key
from .unfused_attention import WrittenAttention, written_attentions

OP = "eager_attention"


def rewrite(graph: fx.Graph, report: Report) -> None:
    """Rewrite a graph, and the checkpointed blocks that it calls."""
    states = {part: GraphState(part) for part in parts(graph)}
    made = BlockMasks()
    for scope in scopes(graph, data=True):
        state = states[scope.graph]
        # The rewrite "attention" reports what only comes near.
        for found in written_attentions(scope.graph, OP, Report(), state):
            report.at = (OP, found.root)
            on = value(found.root).device.type
            if on not in masked_attention.DEVICES:
                continue
            report.superseded(found.root)
            try:
                with attempt(scope.graph), state.modes_of(found.root):
                    new = _lower(found, scope, states, made)
            except (Refused, Unknown) as refused:
                report.refused(OP, found.root, str(refused))
                continue
            report.used(OP, new)


def _lower(
    found: WrittenAttention, scope: Scope,
    states: Mapping[fx.Graph, GraphState], made: BlockMasks,
) -> fx.Node:  # fmt: skip
    """Replace one place; returns the call of flex_attention."""
    root, state = found.root, states[scope.graph]
    arguments = dict(zip(("query", "key", "value"), operands(found, state), strict=True))
    if reason := masked_attention.unsupported(root, arguments):
        raise Refused(reason)
    condition = _condition(found, scope, scores(arguments))
    for mask in found.masks:
        if reason := write(scope.functions, mask.tensor.source, states.values()):
            raise Refused(reason)
    emit = Emitter(root, value(root))
    taken = masked_attention.grouped(emit, root, arguments)
    block_mask = _block_mask(found, condition, scope, made, arguments)
    call = flex_attention.attend(emit, root, taken, found.scale, block_mask, found.softcap)
    result = emit(operator.getitem, call, 0)
    if found.sinks is not None:
        result = _with_sinks(emit, call, result, found.sinks)
    replace([(root, as_root(result, found.back, root, state))], found.nodes, state)
    for name in ("key", "value"):
        if (repeat := repeated(arguments[name], HEADS)) is not None:
            erase_unused(arguments[name], repeat.nodes)
    for mask in found.masks:
        erase_unused(mask.tensor.source, set(scope.functions.read(mask.tensor.source)))
    return call


def _condition(found: WrittenAttention, scope: Scope, shape: tuple[Any, ...]) -> Condition:
    """When a query sees a key, as a function of (b, h, i, j)."""
    if not known(shape[-1] >= 1):
        raise Refused("it may have no keys")
    condition: Condition = True
    for mask in found.masks:
        if value(mask.tensor.source).requires_grad:
            raise Refused("its mask has a gradient")
        if mask.fill is not None and mask.fill > LOWEST_FILL:
            raise Refused(f"it fills hidden scores with {mask.fill}, which is not low enough")
        try:
            condition = both(condition, condition_of(mask, scope.functions, shape))
        except Unknown as unknown:
            raise Refused(f"its mask cannot be analysed: {unknown}") from None
    if (datum := dense_datum(data_of(condition))) is not None:
        raise Refused(f"its mask reads {datum.node.name} for each query and key, a dense tensor")
    return condition


def _may_give_means(
    found: WrittenAttention, condition: Condition, scope: Scope, shape: Any
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


def _holds(found: WrittenAttention, mask: fx.Node, low: float) -> bool:
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
    found: WrittenAttention, condition: Condition, scope: Scope, made: BlockMasks,
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
