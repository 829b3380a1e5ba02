"""relu_squared. M rows, N columns."""

from __future__ import annotations

import triton
import triton.language as tl

from .... import library
from ...common.activations.elementwise import as_rows, row_stride
from ...common.triton_math import relu
from .elementwise import columns, launch_tiles, place


@triton.jit(do_not_specialize=["M"])
def _relu_squared_kernel(
    x_ptr, y_ptr, M, N, stride_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows, col = place(M, N, BLOCK_M, BLOCK_N)
    cols, mask = columns(col, rows, M, N, BLOCK_N)
    x = relu(tl.load(x_ptr + rows * stride_x + cols, mask=mask).to(tl.float32))
    tl.store(y_ptr + rows * N + cols, (x * x).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _relu_squared_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, M, N, stride_dy, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, col = place(M, N, BLOCK_M, BLOCK_N)
    cols, mask = columns(col, rows, M, N, BLOCK_N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask).to(tl.float32)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask).to(tl.float32)
    dx = dy * (2.0 * relu(x))
    tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@library.kernel("relu_squared", "cuda")
def relu_squared(call, y, plan):
    y, x = as_rows(y, call.x)
    launch_tiles(_relu_squared_kernel, plan, x, x, y, *x.shape, row_stride(x))


@library.kernel("relu_squared_backward", "cuda")
def relu_squared_backward(call, dx, plan):
    dx, dy, x = as_rows(dx, call.dy, call.x)
    strides = (row_stride(dy), row_stride(x))
    launch_tiles(_relu_squared_backward_kernel, plan, x, dy, x, dx, *x.shape, *strides)
