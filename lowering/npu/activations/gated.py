"""The gated activations: swiglu, clamped_swiglu and geglu. M rows, N columns of the result."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.activations.elementwise import row_stride
from ...common.activations.gated import GatedActivation, register
from ...common.triton_math import gated, gated_gradients
from ..tiling import COSTS, Cost, Plan
from .elementwise import launch_tiles, load, place, store, tiles

# Elementwise kernels have tiles of any shape. (1, 4096): 50.0% | 41.7%.
COSTS["swiglu"] = Cost({}, {2: 24.1, 4: 20.1})
# (1, 2048): 83.7% | 79.5%.
COSTS["swiglu_backward"] = Cost({}, {2: 80.5, 4: 76.5})
# (1, 4096): 50.0% | 41.7%.
COSTS["clamped_swiglu"] = Cost({}, {2: 24.1, 4: 20.1})
# (1, 1024): 50.4% | 50.4%, (1, 2048): 92.5% | 92.5%.
COSTS["clamped_swiglu_backward"] = Cost({}, {2: 96.9, 4: 96.9})
# (1, 4096): 66.7% | 66.7%.
COSTS["interleaved_clamped_swiglu"] = Cost({}, {2: 32.1, 4: 32.1})
# (1, 1024): 79.6% | 79.6%, (1, 2048): 95.8% | 100%.
COSTS["interleaved_clamped_swiglu_backward"] = Cost({}, {2: 153, 4: 153})
# (1, 4096): 58.3% | 50.0%, fp32 (1, 8192): 100%.
COSTS["geglu_tanh"] = Cost({}, {2: 28.1, 4: 24.1})
# (1, 2048): 87.9% | 83.7%.
COSTS["geglu_tanh_backward"] = Cost({}, {2: 84.5, 4: 80.5})
# (1, 4096): 75.0% | 75.0%.
COSTS["geglu_none"] = Cost({}, {2: 36.1, 4: 36.1})
# (1, 2048): 54.2% | 54.2%, (1, 4096): 100%.
COSTS["geglu_none_backward"] = Cost({}, {2: 52.1, 4: 52.1})


@triton.jit
def load_gate_and_up(
    gate_ptr, up_ptr, row, col, M, N, stride_gate, stride_up,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load a tile of gate and of up; if INTERLEAVED, both are columns of gate_ptr in turn."""
    if INTERLEAVED:
        pairs = load(gate_ptr, row, col * 2, M, N * 2, stride_gate, BLOCK_M, BLOCK_N * 2)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_N, 2)))
    else:
        gate = load(gate_ptr, row, col, M, N, stride_gate, BLOCK_M, BLOCK_N)
        up = load(up_ptr, row, col, M, N, stride_up, BLOCK_M, BLOCK_N)
    return gate, up


@triton.jit(do_not_specialize=["M"])
def _gated_kernel(
    y_ptr, gate_ptr, up_ptr, M, N, stride_gate, stride_up, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, N, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, N, BLOCK_M, BLOCK_N)
        gate, up = load_gate_and_up(
            gate_ptr, up_ptr, row, col, M, N, stride_gate, stride_up, INTERLEAVED, BLOCK_M, BLOCK_N
        )
        y = gated(gate, up, a, b, c, ACTIVATION)
        store(y_ptr, row, col, M, N, N, y, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    M, N, stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, N, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, N, BLOCK_M, BLOCK_N)
        gate, up = load_gate_and_up(
            gate_ptr, up_ptr, row, col, M, N, stride_gate, stride_up, INTERLEAVED, BLOCK_M, BLOCK_N
        )
        dy = load(dy_ptr, row, col, M, N, stride_dy, BLOCK_M, BLOCK_N)
        dgate, dup = gated_gradients(dy, gate, up, a, b, c, ACTIVATION)
        if INTERLEAVED:
            pairs = tl.interleave(dgate, dup)
            store(dgate_ptr, row, col * 2, M, N * 2, stride_dgate, pairs, BLOCK_M, BLOCK_N * 2)
        else:
            if dgate_ptr is not None:
                store(dgate_ptr, row, col, M, N, stride_dgate, dgate, BLOCK_M, BLOCK_N)
            if dup_ptr is not None:
                store(dup_ptr, row, col, M, N, stride_dup, dup, BLOCK_M, BLOCK_N)


def _cost(activation: GatedActivation) -> str:
    """Return the forward kernel's key in COSTS."""
    return f"interleaved_{activation.name}" if activation.interleaved else activation.name


def launch_gated(
    activation: GatedActivation, y: Tensor, gate: Tensor, up: Tensor | None, plan: Plan | None
) -> None:
    launch_tiles(
        _cost(activation), _gated_kernel, plan,
        [y, gate, up], row_stride(gate), row_stride(up), *activation.scalars,
        ACTIVATION=activation.name, INTERLEAVED=activation.interleaved,
    )  # fmt: skip


def launch_gated_backward(
    activation: GatedActivation, dy: Tensor, *others: Tensor | None, plan: Plan | None
) -> None:
    tensors = [dy, *others]
    launch_tiles(
        f"{_cost(activation)}_backward", _gated_backward_kernel, plan,
        tensors, *map(row_stride, tensors), *activation.scalars,
        ACTIVATION=activation.name, INTERLEAVED=activation.interleaved,
    )  # fmt: skip


register("npu", launch_gated, launch_gated_backward)
