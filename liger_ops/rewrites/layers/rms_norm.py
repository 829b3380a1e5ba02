"""Root-mean-square normalisation, as models write it, also after a residual addition: the op then
returns the norm and the sum.

Residuals are looked for after rms_norm, on the ops that it inserted and on those of the user's
code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import calls, is_tensor, same, value
from ..engine.casts import mark, modes_of
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive, insert, items, run
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import InDtypesOfInputs, foreign, number, replace, reported


def _widened(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _promoted(x: Tensor, eps: float) -> Tensor:
    """Normalise x, whose product with the float32 factor is float32 by type promotion."""
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def _unwidened(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _op(casting_mode: str, weighted: bool = True, offset: float = 0.0) -> Any:
    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        weight = match["weight"] if weighted else None
        if weighted and not is_tensor(weight, dim=1):
            shape = tuple(value(weight).shape) if is_tensor(weight) else weight
            raise Refused(f"the weight has the shape {shape}, not that of a row")
        added = number(match["offset"]) if "offset" in match.values else offset
        args = (match["x"], weight, number(match["eps"]), added, casting_mode)
        return torch.ops.liger.rms_norm.default, args

    return InDtypesOfInputs(replacement)


def _float32_op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    """Return the op of x cast to float32, for code whose result is float32."""
    target, (x, *rest) = _op("gemma")(match)
    return target, (derive(match.root, torch.Tensor.to, x, torch.float32), *rest)


def _torch_op(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if match["eps"] is None:
        raise Refused("eps=None is the dtype's own epsilon, which the op does not support")
    dimensions = len(value(match["normalized_shape"]))
    if dimensions != 1:
        raise Refused(f"it normalises over {dimensions} dimensions, not the last alone")
    # PyTorch's norm returns x's dtype, as the op does. Under autocast both inputs are cast to
    # float32, for PyTorch's norm and for the op alike.
    dtypes = {value(x).dtype for x in (match["input"], match["weight"]) if x is not None}
    is_cast = value(match.root).dtype == torch.float32 and torch.float64 not in dtypes
    if len(dtypes) > 1 and not is_cast:
        raise Refused("the weight is not of the dtype of x")
    args = (match["input"], match["weight"], number(match["eps"]), 0.0, "gemma")
    return torch.ops.liger.rms_norm.default, args


def _weighted(code: Callable[..., Tensor], **more: Any) -> Pattern:
    return Pattern(code, x=(2, 3, 8), weight=(8,), eps=1e-6, **more)


def _unweighted(code: Callable[..., Tensor]) -> Pattern:
    return Pattern(code, x=(2, 3, 8), eps=1e-6)


_TORCH = Pattern(F.rms_norm, input=(2, 3, 8), normalized_shape=[8], weight=(8,), eps=1e-6)
_GEMMA = _weighted(
    lambda x, weight, eps, offset: (_widened(x, eps) * (offset + weight.to(torch.float32))).to(
        x.dtype
    ),
    offset=1.0,
)
SPELLINGS = [
    (_TORCH, _torch_op),
    # Before Llama's pattern, whose weight would match the sum of offset and weight, in float32.
    (_GEMMA, _op("gemma")),
    # Llama and T5.
    (_weighted(lambda x, weight, eps: weight * _widened(x, eps).to(x.dtype)), _op("llama")),
    (_weighted(lambda x, weight, eps: weight * _promoted(x, eps).to(x.dtype)), _op("llama")),
    # OLMo 2, Helium and Mochi.
    (_weighted(lambda x, weight, eps: (weight * _widened(x, eps)).to(x.dtype)), _op("gemma")),
    (
        _weighted(lambda x, weight, eps: (weight.to(torch.float32) * _widened(x, eps)).to(x.dtype)),
        _op("gemma"),
    ),
    (_weighted(lambda x, weight, eps: (weight * _promoted(x, eps)).to(x.dtype)), _op("gemma")),
    (_weighted(lambda x, weight, eps: _unwidened(x, eps) * weight), _op("none")),
    # `RMSNorm` of diffusers with a float32 weight: the result is float32, whatever x is.
    (_weighted(lambda x, weight, eps: _promoted(x, eps) * weight), _float32_op),
    (_unweighted(lambda x, eps: _widened(x, eps).to(x.dtype)), _op("gemma", weighted=False)),
    (_unweighted(lambda x, eps: _promoted(x, eps).to(x.dtype)), _op("gemma", weighted=False)),
    (_unweighted(_unwidened), _op("none", weighted=False)),
]


OP = "fused_add_rms_norm"


def add_residuals(graph: fx.Graph, report: Report) -> None:
    state = GraphState(graph)
    for norm in report.visiting(OP, list(graph.nodes)):
        if (norm_call := calls(norm, "liger.rms_norm")) is None:
            continue
        total, *options = norm_call.args
        add_call = calls(total, "add")
        if add_call is None or not all(map(is_tensor, add_call.args)):
            continue
        if state.transformed(norm):
            continue
        with reported(graph, report, OP, norm):
            _fuse(norm, total, options, add_call.args, state, report)


def _fuse(
    norm: fx.Node, total: fx.Node, options: list[Any], terms: tuple[Any, ...],
    state: GraphState, report: Report,
) -> None:  # fmt: skip
    if not all(same(tuple(value(term).shape), tuple(value(total).shape)) for term in terms):
        raise Refused("the residual is broadcast")
    # The op goes before the first use of the sum, so all its arguments must be computed by then.
    first = min(total.users, key=state.order.__getitem__)
    late = [
        argument
        for argument in norm.all_input_nodes
        if argument is not total and state.order[argument] >= state.order[first]
    ]
    if late:
        raise Refused(f"{late[0].name} is computed only after the sum is used, by {first.name}")
    if reason := foreign([*terms, *norm.all_input_nodes]):
        raise Refused(reason)
    if not state.one_mode([total, norm, first]):
        raise Refused("the sum and the norm run in different gradient or autocast modes")
    if state.written([total, *terms, *norm.all_input_nodes], total, norm):
        raise Refused("a tensor is written in place between the sum and the norm")
    target, args = torch.ops.liger.fused_add_rms_norm.default, (*terms, *options)
    with modes_of(norm, state) as is_outside:
        results = run(target, args)
    fused = insert(first, target, args, results)
    if is_outside:
        mark(fused)
    fused.meta.update({key: norm.meta[key] for key in ("stack_trace",) if key in norm.meta})
    y, s = items(fused, 2)
    replace([(norm, y), (total, s)], {norm, total}, state)
    report.superseded(norm)
    report.used(OP, fused)
