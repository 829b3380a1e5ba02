"""Replace attention that a model writes out by a call of scaled_dot_product_attention.

The call gives the same numbers within rounding: kernels keep scores and softmax in float32, where
the code may round them to a narrower dtype. Rows whose keys are all hidden are the exception. There
the code gives NaN for masks of minus infinity, and the mean of the values for masks of a very low
number; kernels give 0, NaN or the mean, depending on the kernel, and wrong gradients: they save the
logarithm of the sum of such a row's weights, in which the number of keys is lost. So a mask is
taken if it is a bias of ordinary numbers, or if each of its rows is proved to see a key, from the
operations that compute it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..engine.canonical import calls, same, value
from ..engine.casts import represents
from ..engine.graph_state import GraphState, noticed
from ..engine.insertion import Refused, View, derive, fake_mode_of, insert, viewed
from ..engine.maps.algebra import always_true
from ..engine.report import Report
from ..engine.rewrite import attempt, replace
from .attention import Mask, States, is_written, replace_candidates, visible_past
from .attention_products import Operand
from .mask.bounds import ORDINARY, MaskBounds, inside
from .mask.evaluate import Scope
from .mask.proof import sees_a_key
from .unfused_attention import UnfusedAttention, unfused_attentions

OP = "attention"
# A filled score as low as this has the weight 0 in a row with any other score.
LOWEST_FILL = -1e9


def rewrite(graph: fx.Graph, report: Report) -> None:
    candidates = functools.partial(unfused_attentions, OP, report)
    replace_candidates(graph, report, OP, candidates, _replacement)


def _replacement(attention: UnfusedAttention, scope: Scope, states: States) -> fx.Node:
    state = states[scope.graph]
    if attention.sinks is not None:
        raise Refused("it has sinks, which scaled_dot_product_attention does not take")
    if attention.softcap is not None:
        raise Refused("its scores are capped, which scaled_dot_product_attention cannot do")
    root = attention.root
    query, key, values = operand_nodes(attention, state)
    if not always_true(value(key).shape[-2] >= 1):
        raise Refused("it may have no keys")
    mask = _mask(attention, (query, key), scope, states)
    options = {"attn_mask": mask, "scale": attention.scale}
    try:
        with fake_mode_of([value(root)]):
            result = F.scaled_dot_product_attention(
                value(query),
                value(key),
                value(values),
                attn_mask=value(mask),
                scale=attention.scale,
            )
    except RuntimeError as error:
        raise Refused(f"scaled_dot_product_attention does not take it: {error}") from None
    call = insert(root, F.scaled_dot_product_attention, (query, key, values), result)
    call.kwargs = {name: argument for name, argument in options.items() if argument is not None}
    new = as_root(call, attention.back, root, state)
    replace([(root, new)], attention.nodes, state)
    return call


def as_root(call: fx.Node, back: Sequence[View], root: fx.Node, state: GraphState) -> fx.Node:
    """Return the result in the shape of `root`, and in its strides if the graph observes them."""
    try:
        with attempt(root.graph):
            new = viewed(root, call, back)
            if same(value(new).stride(), value(root).stride()):
                return new
            if reason := noticed({root: value(new)}, state):
                raise Refused(reason)
            return new
    except Refused:
        # A matrix product is contiguous in the shape before `back`, and so is this copy.
        return viewed(root, derive(root, torch.Tensor.contiguous, call), back)


def operand_nodes(attention: UnfusedAttention, state: GraphState) -> list[fx.Node]:
    """Return query, key and value as nodes of one dtype and of the same batch and heads.

    Raises:
        Refused: their dtypes differ outside of autocast, or they are broadcast to a symbolic size.
    """
    root = attention.root
    device = value(root).device.type
    operands = [attention.query, attention.key, attention.value]
    dtype = value(attention.value.source).dtype
    nodes = []
    for operand in operands:
        source = operand.source
        cast = calls(source, "cast")
        # Kernels compute in float32 what the code casts to it.
        if (
            cast is not None
            and value(source).dtype != dtype == value(cast.args[0]).dtype
            and represents(value(source).dtype, dtype)
            and not state.written([cast.args[0]], source, root)
        ):
            operand = Operand(cast.args[0], operand.views)
        nodes.append(operand.before(root))
    dtypes = {value(node).dtype for node in nodes}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(device):
        raise Refused(f"its queries, keys and values have the dtypes {sorted(map(str, dtypes))}")
    leading = torch.broadcast_shapes(*(value(node).shape[:2] for node in nodes))
    return [_expanded(node, leading, root) for node in nodes]


def _expanded(node: fx.Node, leading: Sequence[Any], at: fx.Node) -> fx.Node:
    """Return `node` with the batch and the heads that the product broadcasts it to."""
    sizes = value(node).shape[:2]
    if same(tuple(sizes), tuple(leading)):
        return node
    if not all(same(a, b) or isinstance(b, int) for a, b in zip(sizes, leading, strict=True)):
        raise Refused("its batch or heads are broadcast to a size that is not constant")
    expanded = [-1 if same(a, b) else b for a, b in zip(sizes, leading, strict=True)]
    return derive(at, torch.Tensor.expand, node, *expanded, -1, -1)


def _mask(
    attention: UnfusedAttention, operands: Sequence[fx.Node],
    scope: Scope, states: States,
) -> fx.Node | None:  # fmt: skip
    """Return attn_mask: boolean if the code only fills scores, else of the queries' dtype.

    Raises:
        Refused: a mask may hide every key of a row, its fill is not low enough, or its bias would
            be rounded.
    """
    if not attention.masks:
        return None
    root, (query, key) = attention.root, operands
    autocast = torch.is_autocast_enabled(value(root).device.type)
    dtype = value(root).dtype if autocast else value(query).dtype
    shape = (*value(query).shape[:-1], value(key).shape[-2])
    biases = [mask for mask in attention.masks if _is_bias(mask, scope, states)]
    hiding = [mask for mask in attention.masks if mask not in biases]
    if not _rows_see_a_key(hiding, scope, states, shape):
        raise Refused("its mask may hide every key of a row, for which kernels differ")
    for bias in biases:
        wide = value(bias.source).dtype
        if not represents(dtype, wide):
            raise Refused(f"its bias is {wide}, and would be rounded to {dtype}")
    added = [mask.tensor.before(root) for mask in _masks_of(attention, filled=False)]
    visible = [_visible_node(mask, root) for mask in _masks_of(attention, filled=True)]
    if visible:
        visible = [functools.reduce(lambda a, b: derive(root, operator.and_, a, b), visible)]
    if not added:
        return visible[0]
    total = functools.reduce(lambda a, b: derive(root, operator.add, a, b), added)
    if visible:
        total = derive(root, torch.where, visible[0], total, -math.inf)
    if value(total).dtype != dtype and not autocast:
        total = derive(root, torch.Tensor.to, total, dtype)
    return total


def _masks_of(attention: UnfusedAttention, filled: bool) -> list[Mask]:
    """Return the masks that fill scores, or those that are added to them."""
    return [mask for mask in attention.masks if (mask.visible is not None) == filled]


def _visible_node(mask: Mask, at: fx.Node) -> fx.Node:
    """Return a mask that fills scores as a boolean node that is true where the score stays."""
    assert mask.fill is not None
    if not mask.fill <= LOWEST_FILL:
        raise Refused(f"it fills hidden scores with {mask.fill}, which is not low enough to be 0")
    node = mask.tensor.before(at)
    return node if mask.visible else derive(at, torch.logical_not, node)


def _is_bias(mask: Mask, scope: Scope, states: States) -> bool:
    """Return whether a mask adds ordinary numbers (`mask.bounds`), which hide no key."""
    if mask.visible is not None:
        return False
    bounds = MaskBounds(scope.operands)
    return inside(bounds.of(mask.source), ORDINARY) and not is_written(bounds.read, states)


def _rows_see_a_key(
    masks: Sequence[Mask], scope: Scope, states: States, shape: Sequence[Any]
) -> bool:
    """Return whether every row is proved to see its own key, or the first key, past all masks."""
    try:
        return sees_a_key(visible_past(masks, scope, states, shape), shape)
    except Refused:
        return False
