"""A norm and its modulation, y * (1 + scale) + shift, in one op: AdaLN of diffusion transformers.

Runs after the rewrites layer_norm and rms_norm, on the ops that they inserted and on those of the
user's code. A norm that several modulations share, as in the dual attention of Stable Diffusion
3.5, becomes one op for each of them if nothing else uses it: each reads x, where the modulation
would read the norm's result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import Call, same, value
from ..engine.canonical.call import spelled
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

layer_norm = torch.ops.liger.layer_norm.default
rms_norm = torch.ops.liger.rms_norm.default
NORMS = (layer_norm, rms_norm)


@spelled(layer_norm)
def _layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Call:
    return Call("liger.layer_norm", (x, weight, bias, eps))


@spelled(rms_norm)
def _rms_norm(
    x: Any, weight: Any = None, eps: Any = 1e-6, offset: Any = 0.0, casting_mode: Any = "llama"
) -> Call:
    return Call("liger.rms_norm", (x, weight, eps, offset, casting_mode))


def rewrite_layer_norm(graph: fx.Graph, report: Report) -> None:
    _rewrite(graph, report, "modulated_layer_norm", LAYER_NORMS)


def rewrite_rms_norm(graph: fx.Graph, report: Report) -> None:
    _rewrite(graph, report, "modulated_rms_norm", RMS_NORMS)


def _rewrite(
    graph: fx.Graph, report: Report, name: str, spellings: list[tuple[Pattern, Replacement]]
) -> None:
    search = Search(graph, report, name, shared=NORMS)
    found: dict[fx.Node, list[_Modulation]] = defaultdict(list)
    for match, replacement in search.matches(spellings):
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


def _layer_norm_of(rounds: bool, unsqueezed: bool) -> Replacement:
    return lambda match: (
        torch.ops.liger.modulated_layer_norm.default,
        (
            *_rows(match, rounds, unsqueezed), match["weight"], match["bias"], match["eps"],
            "torch" if rounds else "float32",
        ),
    )  # fmt: skip


def _rms_norm_of(rounds: bool, unsqueezed: bool) -> Replacement:
    return lambda match: (
        torch.ops.liger.modulated_rms_norm.default,
        (
            *_rows(match, rounds, unsqueezed), match["weight"], match["eps"], match["offset"],
            match["casting_mode"] if rounds else "float32",
        ),
    )  # fmt: skip


# The modulation of y, the result of a norm of x. A dimension that stands for the tokens is added
# to scale and shift before, as in DiT, or to their sum with 1 after, as in AdaLayerNormContinuous.
def shifted(y: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (y * (1 + scale) + shift).to(x.dtype)


def scaled(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return (y * (1 + scale)).to(x.dtype)


def unsqueezed_after(y: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (y * (1 + scale).unsqueeze(-2) + shift.unsqueeze(-2)).to(x.dtype)


def unsqueezed_after_alone(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return (y * (1 + scale).unsqueeze(-2)).to(x.dtype)


# Modulation, its examples, and whether it is of the form `unsqueezed`. With the shift first: the
# other would match the product, of which the sum is another use.
FORMS: tuple[tuple[Callable[..., Tensor], dict[str, Any], bool], ...] = (
    (shifted, {"scale": (2, 1, 8), "shift": (2, 1, 8)}, False),
    (unsqueezed_after, {"scale": (2, 8), "shift": (2, 8)}, True),
    (scaled, {"scale": (2, 1, 8)}, False),
    (unsqueezed_after_alone, {"scale": (2, 8)}, True),
)


def _layer_norm_pattern(
    form: Callable[..., Tensor], wide: bool, cast: bool, **examples: Any
) -> Pattern:
    def with_shift(x: Any, weight: Any, bias: Any, eps: Any, scale: Any, shift: Any) -> Tensor:
        y = layer_norm(x.to(torch.float32) if wide else x, weight, bias, eps)
        return form(y, x if cast else y, scale, shift)

    def without(x: Any, weight: Any, bias: Any, eps: Any, scale: Any) -> Tensor:
        y = layer_norm(x.to(torch.float32) if wide else x, weight, bias, eps)
        return form(y, x if cast else y, scale)

    function = with_shift if "shift" in examples else without
    return Pattern(function, x=(2, 3, 8), weight=(8,), bias=(8,), eps=1e-5, **examples)


def _rms_norm_pattern(
    form: Callable[..., Tensor], wide: bool, cast: bool, **examples: Any
) -> Pattern:
    def with_shift(
        x: Any, weight: Any, eps: Any, offset: Any, casting_mode: Any, scale: Any, shift: Any
    ) -> Tensor:
        wanted = x.to(torch.float32) if wide else x
        y = rms_norm(wanted, weight, eps, offset, casting_mode)
        return form(y, x if cast else y, scale, shift)

    def without(
        x: Any, weight: Any, eps: Any, offset: Any, casting_mode: Any, scale: Any
    ) -> Tensor:
        wanted = x.to(torch.float32) if wide else x
        y = rms_norm(wanted, weight, eps, offset, casting_mode)
        return form(y, x if cast else y, scale)

    function = with_shift if "shift" in examples else without
    options: dict[str, Any] = {"eps": 1e-5, "offset": 0.0, "casting_mode": "llama"}
    return Pattern(function, x=(2, 3, 8), weight=(8,), **options, **examples)


# In float32 first, which the other forms would match too, with a cast of x before. Then with and
# without a cast to x's dtype, which differ under autocast, where the norm of a narrow x is float32.
LAYER_NORMS, RMS_NORMS = (
    [
        (pattern(form, wide, cast, **examples), replacement(not wide, unsqueezed))
        for wide, cast in ((True, True), (False, True), (False, False))
        for form, examples, unsqueezed in FORMS
    ]
    for pattern, replacement in (
        (_layer_norm_pattern, _layer_norm_of),
        (_rms_norm_pattern, _rms_norm_of),
    )
)
