"""Attention with a mask that is the plain causal mask becomes causal attention.

torch's is_causal=True lets query i see the keys j <= i, both counted from 0, however many there are
of each. A mask is replaced where every element of it is proved to be that: boolean ones j <= i,
ones that are added to the scores 0 there and so low elsewhere that nothing is left after the
softmax. Query i sees key 0, so no row is without a key, where masked and causal attention could
differ. Attention with dropout is left: another kernel would draw other random numbers.

On an H200, 8 x 32 heads x 2048 x 64 in bfloat16 with 8 heads of keys, forward and backward: 3.9 ms
with the mask, 1.6 ms causal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .attention import attentions, obstacle, set_arguments
from .canonical import value
from .graph_state import GraphState, erase_unused
from .index_algebra import (
    Affine,
    Condition,
    Frame,
    Region,
    Size,
    Unknown,
    Value,
    index,
    is_condition,
    known,
    lift,
)
from .index_functions import IndexFunctions
from .report import Report
from .rewrite import Refused

OP = "causal_attention"
# On a call that was judged together with the graph around its own.
_JUDGED = "liger_ops.causal_mask"


def rewrite(graph: fx.Graph, report: Report) -> None:
    """Judge the attention calls of a graph, and of the checkpointed blocks that it calls.

    A block's mask is made outside of it: the graph around it is to be rewritten before the block.
    """
    parts = graph.owning_module.modules() if graph.owning_module is not None else ()
    graphs = [part.graph for part in parts if isinstance(part, fx.GraphModule)]
    states = {one: GraphState(one) for one in (graph, *graphs)}
    for functions, scope in _scopes(graph, IndexFunctions()):
        for node, arguments in attentions(scope, OP, report):
            mask = arguments["attn_mask"]
            if mask is None or arguments["is_causal"] is not False or node.meta.get(_JUDGED):
                continue
            node.meta[_JUDGED] = True
            try:
                _make_causal(node, arguments, functions, states, scope)
            except Refused as refused:
                report.refused(OP, node, str(refused))
                continue
            report.used(OP, node)
            erase_unused(mask, set(functions.read(mask)))


def _make_causal(
    node: fx.Node,
    arguments: dict[str, Any],
    functions: IndexFunctions,
    states: Mapping[fx.Graph, GraphState],
    scope: fx.Graph,
) -> None:
    reason = (
        obstacle(node, arguments, states[scope])
        or _difference(functions, arguments)
        or _write(functions, arguments["attn_mask"], states.values())
    )
    if reason is not None:
        raise Refused(reason)
    set_arguments(node, {**arguments, "attn_mask": None, "is_causal": True}, states[scope])


def _scopes(
    graph: fx.Graph, functions: IndexFunctions
) -> Iterator[tuple[IndexFunctions, fx.Graph]]:
    """The graph, and each one that it calls once, with what is known of its operands."""
    yield functions, graph
    calls = _calls(graph)
    called = Counter(module for _, module in calls)
    for node, module in calls:
        inputs = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
        if called[module] > 1 or len(inputs) != len(node.args) - 1:
            continue
        operands = dict(zip(inputs, node.args[1:], strict=True))
        operands = {inner: outer for inner, outer in operands.items() if isinstance(outer, fx.Node)}
        yield from _scopes(module.graph, IndexFunctions(functions, operands))


def _calls(graph: fx.Graph) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The calls of checkpointed blocks, each with its operands after the block."""
    calls = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and (
            node.target.name() == "tag_activation_checkpoint"
        ):
            module = getattr(graph.owning_module, str(node.args[0].target), None)
            if isinstance(module, fx.GraphModule):
                calls.append((node, module))
    return calls


def _difference(functions: IndexFunctions, arguments: dict[str, Any]) -> str | None:
    """In what the mask may differ from the causal one; None where it is that."""
    mask, query = arguments["attn_mask"], value(arguments["query"])
    keys = value(arguments["key"]).shape[-2]
    shape = (*query.shape[:-1], keys)
    if not isinstance(value(mask), Tensor) or not isinstance(mask, fx.Node):
        return "its mask is not a tensor of the graph"
    if not known(keys >= 1):
        return "it is not known to have a key"
    mask_shape = value(mask).shape
    if len(mask_shape) > len(shape) or not all(
        known(size == 1) or known(size == shape[axis])
        for axis, size in enumerate(mask_shape, start=-len(mask_shape))
    ):
        return f"its mask of {tuple(mask_shape)} is not known to fit its scores, {shape}"
    try:
        visible = _visible(functions.value(mask))
        return departure(visible, shape)
    except Unknown as unknown:
        return f"its mask is not known: {unknown}"


def _visible(mask: Value) -> Condition:
    """Where a mask lets a query see a key."""
    if is_condition(mask):
        return mask

    def leaf_is_visible(leaf: Affine) -> Condition:
        # exp(score - largest score) of float32 is 0 from -104 on, and no score comes near -1e30;
        # the least float16, -65504, is not so far from what scores may be.
        if not leaf.slopes and leaf.constant == 0.0:
            return True
        if not leaf.slopes and isinstance(leaf.constant, float) and leaf.constant <= -1e30:
            return False
        raise Unknown("it adds something else than 0 and minus infinity")

    return lift(leaf_is_visible, mask)


def departure(visible: Condition, shape: Sequence[Size]) -> str | None:
    """The first way in which it is not the case that j <= i, of query i and key j."""
    # t, which is no axis, is the distance of i and j, 1 or more but on the diagonal.
    i, j, t = -2, -1, 0
    queries, keys = shape[i], shape[j]
    others = {axis: (0, (shape[axis] - 1,)) for axis in range(-len(shape), i)}

    def region(lower: int, upper: int) -> Region:
        """index[upper] = index[lower] + t, t >= 1, in each pair of the three as variables."""
        most = {i: queries - 1, j: keys - 1}
        ranges: dict[int, tuple[int, tuple[Size, ...]]] = {
            **others,
            lower: (0, (most[lower], most[upper] - 1)),
            upper: (1, (most[upper],)),
            t: (1, (most[upper],)),
        }
        by_lower = {upper: index(lower) + index(t)}
        by_upper = {lower: index(upper) - index(t)}
        return Region([Frame({}, ranges), Frame(by_lower, ranges), Frame(by_upper, ranges)])

    diagonal = Region([Frame({j: index(i)}, {**others, i: (0, (queries - 1, keys - 1))})])
    earlier = known(queries <= 1) or region(lower=j, upper=i).decide(visible)
    if earlier is not True:
        return "its mask may hide an earlier key, as a sliding window does"
    if diagonal.decide(visible) is not True:
        return "its mask may hide a query's own key"
    if not known(keys <= 1) and region(lower=i, upper=j).decide(visible) is not False:
        return "its mask may let a later key be seen"
    return None


def _write(functions: IndexFunctions, mask: fx.Node, states: Iterable[GraphState]) -> str | None:
    """Whether anything that a mask was read from is ever written in place."""
    read = set(functions.read(mask))
    for state in states:
        if state.ever_written(read):
            return "its mask, or what that is made of, is written in place"
    return None
