"""swiglu, clamped_swiglu, geglu and relu_squared. M rows, N columns of the result; a program has
one tile.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ...common.activations.activation_math import gated, gated_gradients, relu
from ...common.activations.activations import GatedActivation, as_rows, register, row_stride
from ...common.tensors import cdiv, tile_width
from ..launch import Plan, Tile, launch


@triton.jit
def place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of this program's tile, and its first column."""
    # int64 from the program on: a flat row may have more than 2**31 elements.
    program = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    row = (program // across).to(tl.int64) * BLOCK_M
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    return rows, (program % across).to(tl.int64) * BLOCK_N


@triton.jit
def columns(col, rows, M, N, BLOCK_N: tl.constexpr):
    """Return BLOCK_N columns from `col` on, and the mask of the elements that are inside
    (M, N)."""
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    return cols, (rows < M) & (cols < N)


def plan_tiles(N: int) -> Tile:
    """Plan tiles of 1024 elements: 128 threads of 8 elements, which are 16 bytes in half
    precision."""
    BLOCK_N = tile_width(N, 1024)
    return Tile(BLOCK_N, BLOCK_M=1024 // BLOCK_N)


def launch_tiles(kernel: Any, plan: Plan | None, x: Tensor, *args: Any, **constants: Any) -> None:
    """Run kernel over the tiles of x, (M, N)."""
    M, N = x.shape
    plan = plan or plan_tiles(N)
    launch(
        kernel, (cdiv(M, plan.BLOCK_M) * cdiv(N, plan.BLOCK_N),), x,
        *args,
        **constants, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


@triton.jit
def _load(
    gate_ptr, up_ptr, rows, col, M, N, stride_gate, stride_up,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load gate and up as float32. INTERLEAVED: they are pairs of columns of one tensor, which are
    loaded together."""
    if INTERLEAVED:
        cols, mask = columns(col * 2, rows, M, N * 2, BLOCK_N * 2)
        pairs = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_N, 2)))
    else:
        cols, mask = columns(col, rows, M, N, BLOCK_N)
        gate = tl.load(gate_ptr + rows * stride_gate + cols, mask=mask)
        up = tl.load(up_ptr + rows * stride_up + cols, mask=mask)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _gated_kernel(
    gate_ptr, up_ptr, y_ptr, M, N, stride_gate, stride_up, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, col = place(M, N, BLOCK_M, BLOCK_N)
    gate, up = _load(
        gate_ptr, up_ptr, rows, col, M, N, stride_gate, stride_up, INTERLEAVED, BLOCK_M, BLOCK_N
    )
    y = gated(gate, up, a, b, c, ACTIVATION)
    cols, mask = columns(col, rows, M, N, BLOCK_N)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    M, N, stride_dy, stride_gate, stride_up, stride_dgate, stride_dup, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, col = place(M, N, BLOCK_M, BLOCK_N)
    gate, up = _load(
        gate_ptr, up_ptr, rows, col, M, N, stride_gate, stride_up, INTERLEAVED, BLOCK_M, BLOCK_N
    )
    cols, mask = columns(col, rows, M, N, BLOCK_N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask).to(tl.float32)
    dgate, dup = gated_gradients(dy, gate, up, a, b, c, ACTIVATION)
    if INTERLEAVED:
        pairs = tl.interleave(dgate, dup).to(dgate_ptr.dtype.element_ty)
        cols, mask = columns(col * 2, rows, M, N * 2, BLOCK_N * 2)
        tl.store(dgate_ptr + rows * stride_dgate + cols, pairs, mask=mask)
    else:
        if dgate_ptr is not None:
            dgate = dgate.to(dgate_ptr.dtype.element_ty)
            tl.store(dgate_ptr + rows * stride_dgate + cols, dgate, mask=mask)
        if dup_ptr is not None:
            dup = dup.to(dup_ptr.dtype.element_ty)
            tl.store(dup_ptr + rows * stride_dup + cols, dup, mask=mask)


def launch_gated(
    activation: GatedActivation, y: Tensor, gate: Tensor, up: Tensor | None, plan: Plan | None
) -> None:
    launch_tiles(
        _gated_kernel, plan, y,
        gate, up, y,
        *y.shape, row_stride(gate), row_stride(up), *activation.scalars,
        ACTIVATION=activation.name, INTERLEAVED=activation.interleaved,
    )  # fmt: skip


def launch_gated_backward(
    activation: GatedActivation, dy: Tensor, *others: Tensor | None, plan: Plan | None
) -> None:
    tensors = (dy, *others)
    launch_tiles(
        _gated_backward_kernel, plan, dy,
        *tensors,
        *dy.shape, *map(row_stride, tensors), *activation.scalars,
        ACTIVATION=activation.name, INTERLEAVED=activation.interleaved,
    )  # fmt: skip


register("cuda", launch_gated, launch_gated_backward)


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
