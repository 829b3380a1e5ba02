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
from ..engine.casts import mark, modes_of
from ..engine.graph_state import erase_unused
from ..engine.insertion import Refused, derive
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import Replacement, Search, attempt, check_results, emit, used_elsewhere

NORMS = (torch.ops.liger.layer_norm.default, torch.ops.liger.rms_norm.default)


def rewrite(norm_name: str, graph: fx.Graph, report: Report) -> None:
    search = Search(graph, report, f"modulated_{norm_name}", shared=NORMS)
    by_norm: dict[fx.Node, list[_ModulatedResult]] = defaultdict(list)
    for match, replacement in search.matches(SPELLINGS[norm_name]):
        try:
            modulation = _modulation_by(match, replacement, search)
        except Refused as refused:
            search.refuse(match, str(refused))
            continue
        search.set_aside(match)
        by_norm[modulation.norm].append(modulation)
    # A norm goes away only if all that uses it is modulations that become ops.
    for norm, modulations in by_norm.items():
        matched = frozenset[fx.Node]().union(*(m.match.nodes for m in modulations))
        try:
            if reason := used_elsewhere(norm, matched):
                raise Refused(reason)
            search.replace(*((m.match, m.new) for m in modulations))
        except Refused as refused:
            for modulation in modulations:
                erase_unused(modulation.new, {modulation.new, modulation.op})
                search.refuse(modulation.match, str(refused))
            continue
        report.superseded(norm)
        for modulation in modulations:
            search.used(modulation.op)
    search.finish()


@dataclass(frozen=True)
class _ModulatedResult:
    """A modulation of a norm's result, and the op that may replace both.

    `op` is in the graph, without users; `new` is its result cast to the dtype of the code's.
    """

    match: Match
    norm: fx.Node
    op: fx.Node
    new: fx.Node


def _modulation_by(match: Match, replacement: Replacement, search: Search) -> _ModulatedResult:
    (norm,) = (node for node in match.nodes if node.target in NORMS)
    with attempt(search.graph), modes_of(norm, search.state) as is_outside:
        target, args = replacement(match)
        new = op = emit(match.root, target, args)
        if _is_widened(match, op):
            new = derive(match.root, torch.Tensor.to, op, value(match.root).dtype)
        check_results({match.root: value(new)}, search.state)
        if is_outside:
            mark(op)
    return _ModulatedResult(match, norm, op, new)


def _is_widened(match: Match, op: fx.Node) -> bool:
    """Return whether the op's result, which is float32 under autocast, is to be cast to x's dtype.

    Autocast casts x to float32 for the op, as for the code's norm, and the code casts the result of
    the modulation back. With scale or shift in float64 it would be rounded twice.
    """
    x = value(match["x"])
    dtypes = (value(match[name]).dtype for name in ("scale", "shift") if name in match.values)
    if not torch.is_autocast_enabled(x.device.type) or torch.float64 in dtypes:
        return False
    return value(op).dtype == torch.float32 and value(match.root).dtype == x.dtype != torch.float32


def _rows(match: Match, rounds: bool, unsqueezed: bool) -> tuple[Any, Any, Any]:
    """Return x, scale and shift.

    Raises Refused if the op would combine other rows of scale and x than PyTorch's broadcasting
    does. `unsqueezed` says that the code adds a dimension to scale, for the tokens, before the
    product.
    """
    x, scale = match["x"], match["scale"]
    known = value(scale)
    has_one_row = all(same(size, 1) for size in known.shape[:-1])
    if known.dim() + unsqueezed != value(x).dim() and not has_one_row:
        raise Refused(f"scale has the shape {tuple(known.shape)}, and is not that of whole samples")
    if not rounds and known.dtype != torch.float32:
        raise Refused(f"1 + scale rounds to {known.dtype}, where the norm is in float32")
    return x, scale, match.values.get("shift")


# Pairs: whether x is widened before the norm, and whether the code casts to x's dtype after it. The
# widened norm comes first, because the others would match it too, with a cast of x before. The
# other two, with and without the last cast, differ only under autocast, where the norm of a narrow
# x is float32.
CASTS = ((True, True), (False, True), (False, False))
# Pairs: whether a dimension for the tokens is added to the sum of scale and 1, as in
# AdaLayerNormContinuous, or was added to scale before, as in DiT; and examples of the arguments.
# The forms with a shift come first: those without would match the product alone, whose use by the
# sum would be a use elsewhere.
FORMS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (False, {"scale": (2, 1, 8), "shift": (2, 1, 8)}),
    (True, {"scale": (2, 8), "shift": (2, 8)}),
    (False, {"scale": (2, 1, 8)}),
    (True, {"scale": (2, 8)}),
)


def _spelling(
    norm: str, wide: bool, cast: bool, unsqueezed: bool, scale: Any, options: dict[str, Any]
) -> tuple[Pattern, Replacement]:
    """Return a pattern for a norm with the arguments `options` and its modulation, and the op.

    The last argument of the op, which says what rounds, is "float32" if x is widened before;
    otherwise it is the norm's casting mode, or "torch" for a norm that has none.
    """

    def modulated(x: Any, scale: Any, shift: Any = None, **args: Any) -> Tensor:
        normed = getattr(torch.ops.liger, norm).default(x.to(torch.float32) if wide else x, **args)
        y = normed * _unsqueezed(1 + scale)
        y = y if shift is None else y + _unsqueezed(shift)
        return y.to((x if cast else normed).dtype)

    def _unsqueezed(rows: Any) -> Any:
        return rows.unsqueeze(-2) if unsqueezed else rows

    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        values = [match[name] for name in options if name != "casting_mode"]
        mode = "float32" if wide else match.values.get("casting_mode", "torch")
        args = (*_rows(match, not wide, unsqueezed), *values, mode)
        return getattr(torch.ops.liger, f"modulated_{norm}").default, args

    return Pattern(modulated, x=(2, 3, 8), **scale, **options), replacement


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "layer_norm": {"weight": (8,), "bias": (8,), "eps": 1e-5},
    "rms_norm": {"weight": (8,), "eps": 1e-5, "offset": 0.0, "casting_mode": "llama"},
}
SPELLINGS = {
    norm: [
        _spelling(norm, *casts, unsqueezed, scale, options)
        for casts in CASTS
        for unsqueezed, scale in FORMS
    ]
    for norm, options in _ARGUMENTS.items()
}
