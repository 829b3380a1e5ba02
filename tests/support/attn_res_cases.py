"""attn_res under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class AttnResCase(Case):
    """shape is x's, whose first dimension is the blocks."""

    query_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    eps: float = 1e-6


def tensors(case: AttnResCase) -> Tensors:
    values = Values(case.seed)
    columns = case.shape[-1:]
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "query": values.draw(columns, case.query_dtype, scale=0.3),
        "weight": values.draw(columns, case.weight_dtype),
        "dy": values.draw(case.shape[1:], case.dtype, case.dy_layout),
    }


def magnitudes(case: AttnResCase, tensors: Tensors) -> tuple[float, float, float]:
    """The magnitudes of y and dx, and of dw, the gradient of query * weight."""
    x, query = tensors["x"].double(), tensors["query"].double()
    if x.numel() == 0:
        return 0.0, 0.0, 0.0
    w = query if tensors["weight"] is None else query * tensors["weight"].double()
    dy = tensors["dy"].double()
    rstd = (x.square().mean(-1, keepdim=True) + case.eps).rsqrt()
    # The error of a score is a relative error of its weight in the mean.
    score = 1 + float(((x * w).abs().sum(-1, keepdim=True) * rstd).max())
    normalised = float((x.abs() * rstd).max())
    dalpha = float((dy * x).abs().sum(-1).max())
    dscore = 2 * dalpha * score
    dx = score * max_abs(dy) + dscore * float(rstd.max()) * (max_abs(w) + normalised * score)
    rows = x.numel() // x.shape[-1]
    return score * max_abs(x), dx, rows * dscore * normalised


def gradient_magnitudes(case: AttnResCase, tensors: Tensors) -> list[float]:
    _, dx, dw = magnitudes(case, tensors)
    return [dx, dw * max_abs(tensors["weight"], 1.0), dw * max_abs(tensors["query"])]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> AttnResCase:
    dtypes = {"query_dtype": dtype, "weight_dtype": dtype}
    return AttnResCase(**{"shape": (4, rows, 6), "dtype": dtype, **dtypes, **form})


OPS = (
    OpUnderTest(
        name="attn_res",
        tensors=tensors,
        forward_args=lambda c, t: (t["x"], t["query"], t["weight"], c.eps),
        backward_args=lambda c, t: (
            *(t[name] for name in ("dy", "x", "query", "weight")),
            c.eps,
            list(c.output_mask),
        ),
        gradients_of=("x", "query", "weight"),
        output_magnitudes=lambda c, t: [magnitudes(c, t)[0]],
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        # Its rows are in the second dimension of x.
        per_row=(),
        leading=("x",),
        autocast_as="mul.Tensor",
    ),
)
