"""rms_norm, with and without a residual added first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common.norms.modulation import PLAIN, Modulation
from ...common.norms.rms_norm import register, rms_mode
from ...common.sizes import next_power_of_2
from ...common.tensors import contiguous
from ..launch import Plan, TwoPass, WholeRow, launch_whole_rows, plan_whole_rows, rows
from .modulation import constants_of
from .norm_backward import NormBackward, plan_whole_rows_backward
from .norm_backward_launch import launch_backward, plan_with_both_sums
from .norm_backward_two_kernel import TwoKernel, plan_two_kernels
from .norm_backward_two_pass import (
    RMS_NORM,
    RMS_NORM_WITH_DS,
    TwoPassBackward,
    plan_two_pass_backward,
)
from .rms_norm_two_pass import launch_two_pass, plan_two_pass
from .rms_norm_whole_row import launch_whole_rows_backward, rms_norm_kernel


def plan_forward(x: Tensor, residual: Tensor | None) -> WholeRow | TwoPass:
    """Plan whole rows below 8192 columns, or with a residual up to 16384, and two passes beyond.

    Shares of the H200's copy rate in bfloat16, whole rows: 1024 wide 86%, 4096 97%, 5120 81%,
    7168 90%; 8192 92%, and more in two passes. With a residual whole rows of 16384 take 95%.
    """
    N = x.shape[1]
    if N < 8192 or (residual is not None and N <= 16384):
        return plan_whole_rows(N, most_threads=256 if N <= 8192 else 512)
    return plan_two_pass(x, residual)


def plan_backward(
    x: Tensor, ds: Tensor | None, has_sums: bool = False
) -> WholeRow | TwoPassBackward | TwoKernel:
    """Plan whole rows if a row fits in 32 KiB: 8192 rows of 16384 take 0.210 ms in bfloat16. In
    float32 such a row does not fit: 0.490 ms whole, and 0.391 in two passes.

    `has_sums`: a modulated norm also needs the sums of dy. A program then has as few registers left
    as in layer_norm.
    """
    if has_sums:
        return plan_with_both_sums(x)
    if next_power_of_2(x.shape[1]) * x.element_size() <= 32768:
        return plan_whole_rows_backward(x, 2 if ds is None else 3)
    table = RMS_NORM if ds is None else RMS_NORM_WITH_DS
    return plan_two_pass_backward(x, table) or plan_two_kernels(x)


def launch_rms_norm(
    call: Any, residual: Tensor | None, y: Tensor, s: Tensor | None, plan: Plan | None,
    modulation: Modulation = PLAIN,
) -> None:  # fmt: skip
    x, weight = rows(call.x), contiguous(call.weight)
    residual = None if residual is None else rows(residual)
    plan = plan or plan_forward(x, residual)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), *modulation.strides)
    tensors = (x, residual, weight, modulation.scale, modulation.shift, y, s)
    arguments = (*tensors, *x.shape, modulation.tokens, *strides, call.eps, call.offset)
    constants = {"CASTING_MODE": rms_mode(call.casting_mode), **constants_of(modulation)}
    if isinstance(plan, WholeRow):
        launch_whole_rows(rms_norm_kernel, plan, x, *arguments, **constants)
    else:
        launch_two_pass(plan, x, y, *arguments, **constants)


def launch_rms_norm_backward(norm: NormBackward, plan: Plan | None) -> None:
    def planned() -> Plan:
        return plan_backward(norm.x, norm.ds, norm.dbias is not None)

    launch_backward(norm, plan, planned, launch_whole_rows_backward)


register("cuda", launch_rms_norm, launch_rms_norm_backward, NormBackward, rows)
