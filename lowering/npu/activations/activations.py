"""swiglu, clamped_swiglu, geglu and relu_squared. M rows, N columns of the result; every program
takes some of the tiles.

The offsets within a tile are int32, and the start of a tile is an int64 scalar.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.activations.activation_math import gated, gated_gradients, relu
from ...common.activations.activations import GatedActivation, as_rows, register, row_stride
from ...common.tensors import cdiv
from .. import tiling
from ..tile import load as load_tile
from ..tile import remaining
from ..tiling import COSTS, Cost, Plan, launch


@triton.jit
def tiles(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of tiles."""
    return tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)


@triton.jit
def place(tile, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and the first column of a tile."""
    across = tl.cdiv(N, BLOCK_N)
    return tile // across * BLOCK_M, tile % across * BLOCK_N


@triton.jit
def _offsets(row, col, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the elements' offsets from the tile's start, and the mask of those within M and N."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < remaining(M, row, BLOCK_M)) & (cols < remaining(N, col, BLOCK_N))
    return rows * stride + cols, mask


@triton.jit
def load(ptr, row, col, M, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a tile as float32, with 0 beyond M and N."""
    offsets, mask = _offsets(row, col, M, N, stride, BLOCK_M, BLOCK_N)
    return load_tile(ptr + row * stride + col, offsets, mask)


@triton.jit
def store(ptr, row, col, M, N, stride, value, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile in the dtype of the pointer, without the elements beyond M and N."""
    offsets, mask = _offsets(row, col, M, N, stride, BLOCK_M, BLOCK_N)
    start = ptr + row * stride + col
    tl.store(start + offsets, value.to(ptr.dtype.element_ty), mask=mask)


def launch_tiles(
    op: str, kernel: Any, plan: Plan | None,
    tensors: list[Tensor | None], *args: Any, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel over the tiles of `tensors`; the first has the result's shape (M, N)."""
    M, N = tensors[0].shape
    plan = plan or tiling.elementwise_plan(op, M, N, *tensors)
    tiles = cdiv(M, plan.BLOCK_M) * cdiv(N, plan.BLOCK_N)
    launch(kernel, plan, tiles, *tensors, M, N, *args, **constants)


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


# (1, 8192): 50.0% | 33.3%.
COSTS["relu_squared"] = Cost({}, {2: 12.1, 4: 8.1})
# (1, 8192): 83.3% | 66.7%.
COSTS["relu_squared_backward"] = Cost({}, {2: 20.1, 4: 16.1})


@triton.jit(do_not_specialize=["M"])
def _relu_squared_kernel(
    y_ptr, x_ptr, M, N, stride_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, N, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, N, BLOCK_M, BLOCK_N)
        x = relu(load(x_ptr, row, col, M, N, stride_x, BLOCK_M, BLOCK_N))
        store(y_ptr, row, col, M, N, N, x * x, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _relu_squared_backward_kernel(
    dx_ptr, dy_ptr, x_ptr, M, N, stride_dy, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, N, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, N, BLOCK_M, BLOCK_N)
        x = relu(load(x_ptr, row, col, M, N, stride_x, BLOCK_M, BLOCK_N))
        dy = load(dy_ptr, row, col, M, N, stride_dy, BLOCK_M, BLOCK_N)
        store(dx_ptr, row, col, M, N, N, dy * (2.0 * x), BLOCK_M, BLOCK_N)


@library.kernel("relu_squared", "npu")
def relu_squared(call, y, plan):
    y, x = as_rows(y, call.x)
    launch_tiles("relu_squared", _relu_squared_kernel, plan, [y, x], row_stride(x))


@library.kernel("relu_squared_backward", "npu")
def relu_squared_backward(call, dx, plan):
    op, tensors = "relu_squared_backward", as_rows(dx, call.dy, call.x)
    strides = map(row_stride, tensors[1:])
    launch_tiles(op, _relu_squared_backward_kernel, plan, tensors, *strides)
