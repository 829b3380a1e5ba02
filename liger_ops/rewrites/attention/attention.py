"""Find calls of scaled_dot_product_attention in a graph, and replace candidates.

A candidate is a call, or attention that is written out (`unfused_attention`), that a rewrite of
attention either replaces or refuses. Its masks become one condition: that a query sees a key past
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from ...accepted import is_scale
from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, fake_mode_of
from ..engine.maps.algebra import (
    Condition,
    Unknown,
    always_true,
    axes_of,
    conjunction,
    negation,
    truth,
)
from ..engine.report import Report
from ..engine.rewrite import check_results, foreign, reported
from .attention_products import Operand
from .mask.evaluate import IndexFunctions, Scope, all_graphs, scopes
from .mask.proof import visible_keys
from .numbers import scale_of_call

States = Mapping[fx.Graph, GraphState]


@dataclass(frozen=True)
class Mask:
    """A tensor that is added to the scores, or a boolean tensor that fills some of them.

    Attributes:
        tensor: its shape broadcasts to (B, H, S, T).
        visible: the truth of a boolean mask where the score stays; None for a tensor that is added,
            and for the mask of a call, which may be either.
        fill: the number that a boolean mask writes where it hides a score.
    """

    tensor: Operand
    visible: bool | None = None
    fill: float | None = None

    @property
    def source(self) -> fx.Node:
        return self.tensor.source


def visible_past(
    masks: Iterable[Mask], scope: Scope, states: States, shape: Sequence[Any]
) -> Condition:
    """Return the condition that a query sees a key past all masks, a function of (b, h, i, j).

    `shape` is the shape of the scores.

    Raises:
        Refused: the condition of a mask is unknown, or it may not fit the scores; there may be no
            keys; or a tensor that a condition was read from is written in place.
    """
    if not always_true(shape[-1] >= 1):
        raise Refused("it may have no keys")
    condition: Condition = True
    for mask in masks:
        try:
            condition = conjunction(condition, _condition_of(mask, scope.functions, shape))
        except Unknown as unknown:
            raise Refused(f"its mask cannot be analysed: {unknown}") from None
        if is_written(scope.functions.nodes_read(mask.source), states):
            raise Refused("its mask, or a tensor that it is computed from, is written in place")
    return condition


def is_written(nodes: Iterable[fx.Node], states: States) -> bool:
    """Return whether one of the tensors is written in place in any of the graphs."""
    nodes = set(nodes)
    return any(state.ever_written(nodes) for state in states.values())


def _condition_of(mask: Mask, functions: IndexFunctions, shape: Sequence[Any]) -> Condition:
    """Return the condition under which a mask lets a query see a key of scores of `shape`."""
    sizes = value(mask.source).shape
    # A view for scores of three dimensions, (B * H, S, T), keeps the queries and keys alone.
    same_axes = min(len(sizes), 2) if mask.tensor.views else len(sizes)
    for axis in range(-same_axes, 0):
        if not (always_true(sizes[axis] == 1) or always_true(sizes[axis] == shape[axis])):
            raise Unknown("its mask may not fit its scores")
    if min(axes_of(functions.value(mask.source)), default=0) < -same_axes:
        raise Unknown("its mask differs between the rows of a batch")
    return visible(mask, functions)


def visible(mask: Mask, functions: IndexFunctions) -> Condition:
    """Return the condition that a mask lets a query see a key, in the mask's own indices."""
    function = functions.value(mask.source)
    if mask.visible is None:
        return visible_keys(function)
    return truth(function) if mask.visible else negation(truth(function))


# The node of attention's result, and what replaces it takes: (the call, its arguments), or the
# `UnfusedAttention`.
Candidate = tuple[fx.Node, Any]

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def replace_candidates(
    graph: fx.Graph, report: Report, op: str,
    candidates: Callable[[Scope, GraphState], Iterable[Candidate]],
    replacement: Callable[[Any, Scope, States], fx.Node], *, data: bool = False,
) -> None:  # fmt: skip
    """Replace the candidates of a graph, and of the checkpointed blocks that it calls.

    A block's mask is computed outside of the block, so the outer graph is rewritten first. For
    `data` see `IndexFunctions`.

    Args:
        graph: the graph.
        report: gets a finding for each candidate, replaced or refused.
        op: the name of the rewrite in the report.
        candidates: yields the candidates of a scope.
        replacement: replaces a candidate and returns the new call, or raises Refused.
        data: whether masks may read tensors of the graph.
    """
    states = {subgraph: GraphState(subgraph) for subgraph in all_graphs(graph)}
    for scope in scopes(graph, data=data):
        state = states[scope.graph]
        for node, candidate in candidates(scope, state):
            with reported(scope.graph, report, op, node):
                with state.modes_of(node):
                    inserted = replacement(candidate, scope, states)
                report.used(op, inserted)


def attentions(
    graph: fx.Graph, rewrite: str, report: Report
) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yield each call on tensors of at least two dimensions, with its arguments by name."""
    for node in report.once(rewrite, list(graph.nodes)):
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        arguments = {**_DEFAULTS, **dict(zip(_POSITIONAL, node.args, strict=False)), **node.kwargs}
        tensors = [value(arguments.get(name)) for name in ("query", "key", "value")]
        if all(isinstance(x, Tensor) and not x.is_nested and x.dim() >= 2 for x in tensors):
            yield node, arguments


def masked_calls(
    rewrite: str, report: Report, devices: Collection[str], scope: Scope, _: GraphState
) -> Iterator[Candidate]:
    """Yield the calls with attn_mask and without is_causal, on the types of device in `devices`.

    An empty `devices` stands for all types.
    """
    for node, arguments in attentions(scope.graph, rewrite, report):
        if devices and value(arguments["query"]).device.type not in devices:
            continue
        if arguments["attn_mask"] is not None and arguments["is_causal"] is False:
            yield node, (node, arguments)


def scores_shape(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the shape of the scores: (..., queries, keys)."""
    return (*value(arguments["query"]).shape[:-1], value(arguments["key"]).shape[-2])


def obstacle(node: fx.Node, arguments: dict[str, Any], state: GraphState) -> str | None:
    """Return why a call cannot be changed, whatever its heads are and its mask hides, or None."""
    tensors = [operand for operand in node.all_input_nodes if isinstance(value(operand), Tensor)]
    if reason := foreign(tensors):
        return reason
    if state.transformed(node):
        return "it runs inside of a torch.func transform, such as vmap"
    if value(arguments["dropout_p"]) != 0:
        return "it has dropout, and another kernel would drop other weights"
    scale = scale_of_call(arguments.get("scale"), value(arguments["query"]).shape[-1])
    if not is_scale(scale):
        return f"its scale is {scale or value(arguments['scale'])}, and engines differ for it"
    return None if arguments["attn_mask"] is None else _mask_mismatch(arguments)


def _mask_mismatch(arguments: dict[str, Any]) -> str | None:
    """Return why the mask may not be a mask of these scores, or None."""
    mask, shape = arguments["attn_mask"], scores_shape(arguments)
    if not isinstance(value(mask), Tensor) or not isinstance(mask, fx.Node):
        return "its mask is not a tensor of the graph"
    mask_shape = value(mask).shape
    if len(mask_shape) > len(shape) or not all(
        always_true(size == 1) or always_true(size == shape[axis])
        for axis, size in enumerate(mask_shape, start=-len(mask_shape))
    ):
        return f"its mask of {tuple(mask_shape)} may not fit its scores of {shape}"
    return None


def mask_of(arguments: dict[str, Any]) -> Mask:
    return Mask(Operand(arguments["attn_mask"]))


def set_arguments(node: fx.Node, arguments: dict[str, Any], state: GraphState) -> None:
    """Set the arguments of a call.

    Raises:
        Refused: the result would have another shape, dtype, device or observable stride.
    """
    tensors = tuple(arguments[name] for name in _POSITIONAL[:3])
    options = {
        name: argument
        for name, argument in arguments.items()
        if name not in _POSITIONAL[:3] and not (name in _DEFAULTS and argument == _DEFAULTS[name])
    }
    with state.modes_of(node), fake_mode_of([value(node)]):
        after = F.scaled_dot_product_attention(
            *map(value, tensors), **{name: value(argument) for name, argument in options.items()}
        )
    check_results({node: after}, state)
    node.args, node.kwargs = tensors, options
