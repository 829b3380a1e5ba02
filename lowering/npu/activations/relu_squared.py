"""relu_squared. M rows, N columns."""

from __future__ import annotations

import triton
import triton.language as tl

from .... import library
from ...common.activations.elementwise import as_rows, row_stride
from ...common.triton_math import relu
from ..tiling import COSTS, Cost
from .elementwise import launch_tiles, load, place, store, tiles

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
