"""Launch the backward of rms_norm and layer_norm by the algorithm of a plan."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..launch import Plan, WholeRow
from .norm_backward import NormBackward, plan_whole_rows_backward
from .norm_backward_two_kernel import TwoKernel, launch_two_kernels, plan_two_kernels
from .norm_backward_two_pass import (
    LAYER_NORM,
    TwoPassBackward,
    launch_two_pass_backward,
    plan_two_pass_backward,
)


def plan_with_both_sums(x: Tensor) -> WholeRow | TwoPassBackward | TwoKernel:
    """Plan the backward with the sums of both dy and dy * xhat, as layer_norm needs them. A whole
    row of 16384 does not fit in registers beside both: 8192 such rows take 0.31 ms at the least,
    and 0.23 in two passes."""
    if x.shape[1] <= 8192:
        return plan_whole_rows_backward(x, loads=2)
    return plan_two_pass_backward(x, LAYER_NORM) or plan_two_kernels(x)


def launch_backward(
    norm: NormBackward, plan: Plan | None, planned: Callable[[], Plan],
    launch_whole_rows: Callable[[WholeRow, NormBackward], None],
) -> None:  # fmt: skip
    """Launch by `plan`, or if it is None by the plan that `planned` returns. Only the algorithm of
    two kernels has a modulation with a scale for each row (`norm.token`)."""
    if norm.token is not None and not isinstance(plan, TwoKernel):
        plan = plan_two_kernels(norm.x)
    plan = plan or planned()
    if isinstance(plan, WholeRow):
        launch_whole_rows(plan, norm)
    elif isinstance(plan, TwoPassBackward):
        launch_two_pass_backward(plan, norm)
    else:
        assert isinstance(plan, TwoKernel)
        launch_two_kernels(plan, norm)
