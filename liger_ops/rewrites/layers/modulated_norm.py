"""A norm and its modulation, y * (1 + scale) + shift, in one op: AdaLN of diffusion transformers.

Runs after the rewrites layer_norm and rms_norm, on the ops that they inserted and on those of the
user's code. A norm that several modulations share, as in the dual attention of Stable Diffusion
3.5, becomes one op for each of them if nothing else uses it: each reads x, where the modulation
would read the norm's result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import same, value
from ..engine.graph_state import erase_unused
from ..engine.outside_autocast import mark, modes_of
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import (
    Refused,
    Replacement,
    Search,
    attempt,
    check_results,
    derive,
    emit,
    used_elsewhere,
)

NORMS = (torch.ops.liger.layer_norm.default, torch.ops.liger.rms_norm.default)


def rewrite(of: str, graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, f"modulated_{of}", shared=NORMS)
    found: dict[fx.Node, list[_Modulation]] = defaultdict(list)
    for match, replacement in search.matches(SPELLINGS[of]):
        try:
            modulation = _modulation_by(match, replacement, search)
        except Refused as refused:
            search.refuse(match, str(refused))
            continue
        search.set_aside(match)
        found[modulation.norm].append(modulation)
    for norm, modulations in found.items():
        together = frozenset[fx.Node]().union(*(one.match.nodes for one in modulations))
        try:
            if reason := used_elsewhere(norm, together):
                raise Refused(reason)
            search.replace(*((one.match, one.new) for one in modulations))
        except Refused as refused:
            for one in modulations:
                erase_unused(one.new, {one.new, one.op})
                search.refuse(one.match, str(refused))
            continue
        report.superseded(norm)
        for one in modulations:
            search.used(one.op)
    search.finish()


@dataclass(frozen=True)
class _Modulation:
    """A modulation of a norm's result, and the op that may replace it, cast to the code's dtype.

    The op is in the graph, without users.
    """

    match: Match
    norm: fx.Node
    op: fx.Node
    new: fx.Node


def _modulation_by(match: Match, replacement: Replacement, search: Search) -> _Modulation:
    (norm,) = (node for node in match.nodes if node.target in NORMS)
    with attempt(search.graph), modes_of(norm, search.state) as is_outside:
        target, args = replacement(match)
        new = op = emit(match.root, target, args)
        if _is_widened(match, op):
            new = derive(match.root, torch.Tensor.to, op, value(match.root).dtype)
        check_results({match.root: value(new)}, search.state)
        if is_outside:
            mark(op)
    return _Modulation(match, norm, op, new)


def _is_widened(match: Match, op: fx.Node) -> bool:
    """Whether autocast casts x to float32 for the op, as for the code's norm, and the code casts
    the modulation back. In float64 it would round twice."""
    x = value(match["x"])
    given = (value(match[name]).dtype for name in ("scale", "shift") if name in match.values)
    if not torch.is_autocast_enabled(x.device.type) or torch.float64 in given:
        return False
    return value(op).dtype == torch.float32 and value(match.root).dtype == x.dtype != torch.float32


def _rows(match: Match, rounds: bool, unsqueezed: bool) -> tuple[Any, Any, Any]:
    """x, scale and shift, if the op uses the rows of scale for x that PyTorch's broadcasting uses.

    `unsqueezed`: the code gives scale one more dimension, for the tokens, before the product.
    """
    x, scale = match["x"], match["scale"]
    known = value(scale)
    has_one_row = all(same(size, 1) for size in known.shape[:-1])
    if known.dim() + unsqueezed != value(x).dim() and not has_one_row:
        raise Refused(f"scale has the shape {tuple(known.shape)}, and is not that of whole samples")
    if not rounds and known.dtype != torch.float32:
        raise Refused(f"1 + scale rounds to {known.dtype}, where the norm is in float32")
    return x, scale, match.values.get("shift")


# Whether x is widened before the norm, and whether the code casts to x's dtype after it. In float32
# first, which the others would match too, with a cast of x before. Then with and without the cast,
# which differ under autocast, where the norm of a narrow x is float32.
CASTS = ((True, True), (False, True), (False, False))
# Whether a dimension that stands for the tokens is added to the sum of scale with 1, as in
# AdaLayerNormContinuous, or to scale before, as in DiT; and the examples. With the shift first: the
# other would match the product, of which the sum is another use.
FORMS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (False, {"scale": (2, 1, 8), "shift": (2, 1, 8)}),
    (True, {"scale": (2, 8), "shift": (2, 8)}),
    (False, {"scale": (2, 1, 8)}),
    (True, {"scale": (2, 8)}),
)


def _spelling(
    norm: str, wide: bool, cast: bool, unsqueezed: bool, scale: Any, given: dict[str, Any]
) -> tuple[Pattern, Replacement]:
    """A spelling of a norm with the arguments `given`, and the op. What rounds, the last argument
    of the op, is the norm's casting mode if it has one, and float32 if x is widened before."""

    def modulated(x: Any, scale: Any, shift: Any = None, **given: Any) -> Tensor:
        normed = getattr(torch.ops.liger, norm).default(x.to(torch.float32) if wide else x, **given)
        y = normed * _unsqueezed(1 + scale)
        y = y if shift is None else y + _unsqueezed(shift)
        return y.to((x if cast else normed).dtype)

    def _unsqueezed(rows: Any) -> Any:
        return rows.unsqueeze(-2) if unsqueezed else rows

    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        values = [match[name] for name in given if name != "casting_mode"]
        mode = "float32" if wide else match.values.get("casting_mode", "torch")
        args = (*_rows(match, not wide, unsqueezed), *values, mode)
        return getattr(torch.ops.liger, f"modulated_{norm}").default, args

    return Pattern(modulated, x=(2, 3, 8), **scale, **given), replacement


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "layer_norm": {"weight": (8,), "bias": (8,), "eps": 1e-5},
    "rms_norm": {"weight": (8,), "eps": 1e-5, "offset": 0.0, "casting_mode": "llama"},
}
SPELLINGS = {
    norm: [
        _spelling(norm, *casts, unsqueezed, scale, given)
        for casts in CASTS
        for unsqueezed, scale in FORMS
    ]
    for norm, given in _ARGUMENTS.items()
}
