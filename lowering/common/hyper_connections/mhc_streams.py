"""mhc_pre and mhc_post_res on a device: their registration, and the arithmetic of the kernels of
every device, for a tile of the channels of one token.

The pointers are those of the token, and of the tile's first channel where a tensor has channels. HC
is hc, and H, the streams of a tile, the power of two above it. `streams` is (H, 1), `cols` is (1,
channels of the tile); their dtype is that of the offsets.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from .... import library
from ..tensors import contiguous, streams_of


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, mask):
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def pre(x_ptr, h_ptr, y_ptr, streams, cols, inside, C, HC: tl.constexpr):
    """Write the weighted sum of the streams. `inside` says which columns are channels."""
    of_stream = streams < HC
    x = _load(x_ptr + streams * C + cols, of_stream & inside)
    h = _load(h_ptr + streams, of_stream)
    _store(y_ptr + cols, tl.sum(h * x, axis=0)[None, :], inside)


@triton.jit
def pre_backward(
    dy_ptr, x_ptr, h_ptr, dx_ptr, dh, streams, cols, inside, C,
    HC: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write dx. With WEIGHTS, return dh, the gradient of h_pre so far, (H, 1), plus the tile's
    sums."""
    of_stream = streams < HC
    mask = of_stream & inside
    dy = _load(dy_ptr + cols, inside)
    if dx_ptr is not None:
        h = _load(h_ptr + streams, of_stream)
        _store(dx_ptr + streams * C + cols, h * dy, mask)
    if WEIGHTS:
        dh += tl.sum(_load(x_ptr + streams * C + cols, mask) * dy, axis=1)[:, None]
    return dh


@triton.jit
def post_res(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, y_ptr, streams, cols, inside, C, HC: tl.constexpr
):  # fmt: skip
    """Write the streams of y: each is a weighted sum of the streams of x, plus h_post times f."""
    of_stream = streams < HC
    x = _load(x_ptr + streams * C + cols, of_stream & inside)
    f = _load(f_ptr + cols, inside)
    start = tl.cast(0, tl.int64)
    for out in range(HC):
        weights = _load(h_res_ptr + out * HC + streams, of_stream)
        y = tl.sum(weights * x, axis=0)[None, :] + tl.load(h_post_ptr + out).to(tl.float32) * f
        _store(y_ptr + start + cols, y, inside)
        start += C


@triton.jit
def post_res_backward(
    dy_ptr, x_ptr, f_ptr, h_post_ptr, h_res_ptr, dx_ptr, df_ptr, dh_post, dh_res,
    streams, cols, inside, C, HC: tl.constexpr, H: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write dx and df_out. With WEIGHTS, return dh_post, (H, 1), and dh_res, (H, H), plus the
    tile's sums."""
    of_stream = streams < HC
    dy = _load(dy_ptr + streams * C + cols, of_stream & inside)
    if df_ptr is not None:
        weights = _load(h_post_ptr + streams, of_stream)
        _store(df_ptr + cols, tl.sum(weights * dy, axis=0)[None, :], inside)
    if WEIGHTS:
        dh_post += tl.sum(dy * _load(f_ptr + cols, inside), axis=1)[:, None]
    if WEIGHTS or (dx_ptr is not None):
        start = tl.cast(0, tl.int64)
        for i in range(HC):
            if dx_ptr is not None:
                weights = _load(h_res_ptr + streams * HC + i, of_stream)
                _store(dx_ptr + start + cols, tl.sum(weights * dy, axis=0)[None, :], inside)
            if WEIGHTS:
                x = _load(x_ptr + start + cols, inside)
                column = (tl.arange(0, H)[None, :] == i).to(tl.float32)
                dh_res += tl.sum(dy * x, axis=1)[:, None] * column
            start += C
    return dh_post, dh_res


@triton.jit
def store_sums(
    dh_post, dh_res, dh_post_ptr, dh_res_ptr, HC: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Write a token's dh_post and dh_res."""
    rows, columns = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    if dh_post_ptr is not None:
        _store(dh_post_ptr + rows, dh_post, rows < HC)
    if dh_res_ptr is not None:
        _store(dh_res_ptr + rows * HC + columns, dh_res, (rows < HC) & (columns < HC))


def register(device: str, launch: Callable[..., None]) -> None:
    """Register a device's launch(op, x, plan, *tensors), where x is (M, hc, C), and `tensors` are
    the kernel's arguments: contiguous, and the results last."""
    module = launch.__module__

    @library.kernel("mhc_pre", device, module=module)
    def pre(call, y, plan):
        x = streams_of(call.x)
        launch("mhc_pre", x, plan, x, call.h_pre.contiguous(), y)

    @library.kernel("mhc_pre_backward", device, module=module)
    def pre_backward(call, dx, dh_pre, plan):
        x, others = streams_of(call.x), (call.h_pre.contiguous(), dx, dh_pre)
        launch("mhc_pre_backward", x, plan, call.dy.contiguous(), x, *others)

    @library.kernel("mhc_post_res", device, module=module)
    def post_res(call, y, plan):
        x, others = streams_of(call.x), map(contiguous, (call.f_out, call.h_post, call.h_res))
        launch("mhc_post_res", x, plan, x, *others, y)

    @library.kernel("mhc_post_res_backward", device, module=module)
    def post_res_backward(call, *gradients_and_plan):
        *gradients, plan = gradients_and_plan
        x, others = streams_of(call.x), map(contiguous, (call.f_out, call.h_post, call.h_res))
        tensors = (call.dy.contiguous(), x, *others, *gradients)
        launch("mhc_post_res_backward", x, plan, *tensors)
