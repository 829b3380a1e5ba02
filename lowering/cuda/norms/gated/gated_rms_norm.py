"""gated_rms_norm. Each of `groups` groups of N columns is a norm of M rows by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..... import library
from ....common.sizes import next_power_of_2
from ....common.tensors import contiguous
from ...launch import Plan, TwoPass, WholeRow, plan_whole_rows, rows
from ...partial_sums import partial_sums, summed
from ..norm_backward import plan_whole_rows_backward
from ..norm_backward_two_kernel import TwoKernel, plan_two_kernels
from ..rms_norm_two_pass import plan_two_pass
from .gated_rms_norm_two_pass import launch_two_pass
from .gated_rms_norm_whole_row import launch_whole_row_gradients, launch_whole_rows
from .gated_rms_norm_wide_backward import launch_two_kernels


# The plans are those of fused_add_rms_norm, which also reads two tensors. Shares of the H200's copy
# rate in bfloat16, forward and backward: (32768, 4096) 99% and 87%, (16384, 8192) 99% and 87%,
# (262144, 128) 89% and 75%.
def plan_forward(group: Tensor, gate: Tensor) -> WholeRow | TwoPass:
    N = group.shape[1]
    if N <= 16384:
        return plan_whole_rows(N, most_threads=256 if N <= 8192 else 512)
    return plan_two_pass(group, gate)


def plan_backward(x: Tensor, group: Tensor) -> WholeRow | TwoKernel:
    """Plan whole rows if a group fits in registers, else two kernels. `programs` are those of each
    group.

    Compiled for sm_90, rows of 4096 with 32 elements a thread spill 176 bytes, and with 16 none.
    """
    if next_power_of_2(group.shape[1]) <= 8192:
        plan = plan_whole_rows_backward(group, 3)
        threads = max(plan.threads, plan.BLOCK_M * plan.BLOCK_N // 16)
        programs = max(1, plan.programs // (x.shape[1] // group.shape[1]))
        return replace(plan, threads=threads, programs=programs)
    return plan_two_kernels(x)


def _constants(call: Any) -> dict[str, Any]:
    return {"NORM_FIRST": call.norm_before_gate, "ACTIVATION": call.activation}


def _group(call: Any, x: Tensor) -> Tensor:
    """Return the columns of the first group: all groups have its shape."""
    return x if call.group_size is None else x[:, : call.group_size]


@library.kernel("gated_rms_norm", "cuda")
def gated_rms_norm(call: Any, y: Tensor, plan: Plan | None) -> None:
    x, gate, weight = rows(call.x), rows(call.gate), contiguous(call.weight)
    group = _group(call, x)
    plan = plan or plan_forward(group, gate)
    M, N = group.shape
    sizes = (M, N, x.shape[1] // N, x.stride(0), gate.stride(0), call.eps)
    constants = {**_constants(call), "CASTING_MODE": call.casting_mode}
    launch_forward = launch_whole_rows if isinstance(plan, WholeRow) else launch_two_pass
    launch_forward(plan, (x, gate, weight, y), sizes, constants)


@library.kernel("gated_rms_norm_backward", "cuda")
def gated_rms_norm_backward(
    call: Any, dx: Tensor | None, dgate: Tensor | None, dweight: Tensor | None, plan: Plan | None
) -> None:
    dy, x, gate, weight = *map(rows, (call.dy, call.x, call.gate)), contiguous(call.weight)
    group = _group(call, x)
    plan = plan or plan_backward(x, group)
    M, N = group.shape
    partial = partial_sums(dweight, plan.programs)
    tensors = (dy, x, gate, weight, dx, dgate, partial)
    sizes = (M, N, x.shape[1] // N, *(tensor.stride(0) for tensor in (dy, x, gate)), call.eps)
    whole = isinstance(plan, WholeRow)
    launch_backward = launch_whole_row_gradients if whole else launch_two_kernels
    launch_backward(plan, tensors, sizes, _constants(call))
    summed((partial, dweight))
