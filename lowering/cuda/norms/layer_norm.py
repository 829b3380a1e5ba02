"""layer_norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...common.norms.layer_norm import register
from ...common.norms.modulation import PLAIN, Modulation
from ...common.tensors import contiguous
from ..launch import Plan, TwoPass, WholeRow, launch_whole_rows, plan_whole_rows, rows
from .layer_norm_two_pass import launch_two_pass, plan_two_pass
from .layer_norm_whole_row import launch_whole_rows_backward, layer_norm_kernel
from .modulation import constants_of
from .norm_backward import NormBackward
from .norm_backward_launch import launch_backward, plan_with_both_sums


def plan_forward(x: Tensor) -> WholeRow | TwoPass:
    """Plan whole rows up to 16384 columns, and two passes beyond.

    Shares of the H200's copy rate in bfloat16, whole rows: 4096 wide 93%; 16384 wide 92%, and 88%
    in two passes. A thread has 64 bytes: 8192 x 6144 in float32 takes 0.102 ms, and 0.104 with 128
    bytes.
    """
    if x.shape[1] <= 16384:
        return plan_whole_rows(x.shape[1], 512, thread_elements=64 // x.element_size())
    return plan_two_pass(x)


def launch_layer_norm(
    call: Any, y: Tensor, plan: Plan | None, modulation: Modulation = PLAIN
) -> None:
    x, weight, bias = rows(call.x), contiguous(call.weight), contiguous(call.bias)
    plan = plan or plan_forward(x)
    tensors = (x, weight, bias, modulation.scale, modulation.shift, y)
    strides = (x.stride(0), *modulation.strides)
    arguments = (*tensors, *x.shape, modulation.tokens, *strides, call.eps)
    if isinstance(plan, WholeRow):
        launch_whole_rows(layer_norm_kernel, plan, x, *arguments, **constants_of(modulation))
    else:
        launch_two_pass(plan, x, *arguments, **constants_of(modulation))


def launch_layer_norm_backward(norm: NormBackward, plan: Plan | None) -> None:
    launch_backward(norm, plan, lambda: plan_with_both_sums(norm.x), launch_whole_rows_backward)


register("cuda", launch_layer_norm, launch_layer_norm_backward, NormBackward, rows)
