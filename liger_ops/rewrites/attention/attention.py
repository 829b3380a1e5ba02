"""Calls of scaled_dot_product_attention, and their arguments by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.replay import fake_mode_of
from ..engine.report import Report
from ..engine.rewrite import check_results, foreign

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def attentions(
    graph: fx.Graph, rewrite: str, report: Report
) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yield each call on tensors of at least two dimensions, with its arguments by name."""
    for node in report.visiting(rewrite, list(graph.nodes)):
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        arguments = {**_DEFAULTS, **dict(zip(_POSITIONAL, node.args, strict=False)), **node.kwargs}
        tensors = [value(arguments.get(name)) for name in ("query", "key", "value")]
        if all(isinstance(x, Tensor) and not x.is_nested and x.dim() >= 2 for x in tensors):
            yield node, arguments


def scores(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The shape of the scores: (..., queries, keys)."""
    return (*value(arguments["query"]).shape[:-1], value(arguments["key"]).shape[-2])


def obstacle(node: fx.Node, arguments: dict[str, Any], state: GraphState) -> str | None:
    """Reason to leave a call unchanged, whatever its mask and heads are, or None."""
    tensors = [one for one in node.all_input_nodes if isinstance(value(one), Tensor)]
    if reason := foreign(tensors):
        return reason
    if state.transformed(node):
        return "it runs inside of a torch.func transform, such as vmap"
    if value(arguments["dropout_p"]) != 0:
        return "it has dropout, and another kernel would drop other weights"
    return None


def set_arguments(node: fx.Node, arguments: dict[str, Any], state: GraphState) -> None:
    """Set the arguments of a call; raises Refused if its result would have other metadata."""
    tensors = tuple(arguments[name] for name in _POSITIONAL[:3])
    options = {
        name: given
        for name, given in arguments.items()
        if name not in _POSITIONAL[:3] and not (name in _DEFAULTS and given == _DEFAULTS[name])
    }
    with state.modes_of(node), fake_mode_of([value(node)]):
        after = F.scaled_dot_product_attention(
            *map(value, tensors), **{name: value(given) for name, given in options.items()}
        )
    check_results({node: after}, state)
    node.args, node.kwargs = tensors, options
