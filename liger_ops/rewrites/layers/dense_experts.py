"""Mixtures of experts in which every expert computes every token, as Llama 4 writes them.

Each expert's copy of a token is multiplied by the token's score for this expert. With the score 0
the row is zeros, and an expert without biases computes zeros from it, with gradients of zero. If a
token has at most K scores other than 0, the experts of its K largest scores therefore compute the
same sum. The rewrite proves this bound from the code: the scores are sigmoids of K values scattered
among -inf.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import calls, same, value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import Search, emit, put_all


def experts_of(activation: Callable[[Tensor], Tensor]) -> Pattern:
    def llama4(x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        E, D = gate_up.shape[0], gate_up.shape[1]
        rows = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(E, -1, D), gate_up).chunk(2, -1)
        y = torch.bmm(up * activation(gate), down).view(-1, D)
        return y.reshape(E, -1, D).sum(0)

    return Pattern(llama4, x=(5, 3), scores=(5, 4), gate_up=(4, 3, 14), down=(4, 7, 3))


def sigmoids(logits: Tensor, index: Tensor, chosen: Tensor) -> Tensor:
    among = torch.full_like(logits, -math.inf).scatter(1, index.to(torch.int64), chosen)
    return torch.sigmoid(among.to(torch.float32)).to(logits.dtype)


def rewrite(graph: fx.Graph, report: Report) -> None:
    put_all(graph, report, "moe_experts", SPELLINGS, _put)


def _put(match: Match, activation: str, search: Search) -> fx.Node:
    with search.state.modes_of(match.root):
        new = _sum_of_chosen(match, _count(match, search.state), activation)
        search.replace((match, new))
    return new


def _count(match: Match, state: GraphState) -> int:
    """Return K: how many scores of a token may be other than 0."""
    scores, tokens, E = match["scores"], value(match["x"]).shape[0], value(match["down"]).shape[0]
    with state.modes_of(scores):
        scores_match = SCORES.match(scores)
    if scores_match is None or scores_match.difference is not None:
        raise Refused("its scores are not sigmoids of a few values among -inf")
    if not same(tuple(value(scores).shape), (tokens, E)):
        raise Refused(f"its scores have the shape {tuple(value(scores).shape)}")
    (scatter,) = (node for node in scores_match.nodes if calls(node, "scatter"))
    first = min(scores_match.nodes, key=state.order.__getitem__)
    # The scatter itself may be in place: its result is what the pattern expects.
    for start, end in ((first, scatter.prev), (scatter.next, match.root)):
        if state.written(scores_match.nodes, start, end):
            raise Refused("its scores are written in place")
    count = value(scores_match["index"]).shape[1]
    if not isinstance(count, int):
        raise Refused("the number of its scores is not known at compile time")
    return count


def _sum_of_chosen(match: Match, count: int, activation: str) -> fx.Node:
    """Insert the op for the `count` experts of a token's largest scores, and the sum over these."""
    make = functools.partial(derive, match.root)
    largest = make(torch.topk, match["scores"], count, 1)
    scores, index = (make(operator.getitem, largest, i) for i in range(2))
    D = value(match["gate_up"]).shape[1]
    x, by = make(torch.unsqueeze, match["x"], 1), make(torch.unsqueeze, scores, 2)
    rows = make(torch.reshape, make(torch.multiply, x, by), (-1, D))
    weights = (make(torch.transpose, match[name], 1, 2) for name in ("gate_up", "down"))
    # The rows are scaled before the experts, so that the op is to weight their results by 1.
    ones = make(torch.ones_like, make(torch.reshape, scores, (-1, 1)))
    args = (
        rows, *weights, make(torch.reshape, index, (-1, 1)), ones, None, None, activation,
    )  # fmt: skip
    y = emit(match.root, torch.ops.liger.moe_experts.default, args)
    return make(torch.sum, make(torch.reshape, y, (-1, count, D)), 1)


SCORES = Pattern(sigmoids, logits=(5, 4), index=(5, 2), chosen=(5, 2))
SPELLINGS = [
    (experts_of(F.silu), "silu"),
    (experts_of(F.gelu), "gelu"),
    (experts_of(functools.partial(F.gelu, approximate="tanh")), "gelu_tanh"),
]
