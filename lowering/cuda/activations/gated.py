"""The gated activations: swiglu, clamped_swiglu and geglu. M rows, N columns of the result."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.activations.elementwise import row_stride
from ...common.activations.gated import GatedActivation, register
from ...common.triton_math import gated, gated_gradients
from ..launch import Plan
from .elementwise import columns, launch_tiles, place


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
