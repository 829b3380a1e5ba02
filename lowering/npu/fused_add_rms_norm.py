"""fused_add_rms_norm: rms_norm's kernels with a residual, and its gradient, folded in."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .rms_norm import launch_rms_norm, launch_rms_norm_backward
from .tiling import Plan


@library.kernel("fused_add_rms_norm", "npu")
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    *,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    y, s = meta.fused_add_rms_norm.fused_add_rms_norm(
        x, residual, weight, eps, offset, casting_mode
    )
    launch_rms_norm(x, residual, weight, y, s, eps, offset, casting_mode, plan)
    return y, s


@library.kernel("fused_add_rms_norm_backward", "npu")
def fused_add_rms_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    output_mask: list[bool],
    *,
    plan: Plan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight = meta.fused_add_rms_norm.fused_add_rms_norm_backward(
        dy, ds, s, weight, eps, offset, output_mask
    )
    launch_rms_norm_backward(dy, ds, s, weight, dx, dweight, eps, offset, plan)
    return dx, dweight
