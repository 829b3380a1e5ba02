"""fused_add_rms_norm: checks and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library
from . import checks
from .rms_norm import check


@library.fake("fused_add_rms_norm")
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    op = "fused_add_rms_norm"
    check(op, x, weight, eps, offset, casting_mode)
    checks.same_form(op, x, "x", residual=residual)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return checks.like(x, dtype), checks.like(x, dtype)


@library.fake("fused_add_rms_norm_backward")
def fused_add_rms_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    op = "fused_add_rms_norm_backward"
    check(op, s, weight, eps, offset)
    checks.same_form(op, s, "s", dy=dy, ds=ds)
    return checks.like_if(output_mask[0], s), checks.like_if(output_mask[1], weight)
