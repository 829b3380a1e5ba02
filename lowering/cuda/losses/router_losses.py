"""router_losses. M tokens, N experts, up to eight layers in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.losses.router_losses import LAYERS
from ...common.losses.loss_math import softmax_and_lse
from ...common.tensors import cdiv, flat, next_power_of_2
from ..launch import Plan, Tile, launch, pipeline_stages, processors
from ..sums import partial_sums, summed


@triton.jit
def _of_layer(ptrs):
    """Return the pointer of this program's layer, program_id(1)."""
    ptr = ptrs[0]
    for i in tl.static_range(1, len(ptrs)):
        ptr = tl.where(tl.program_id(1) == i, ptrs[i], ptr)
    return ptr


@triton.jit
def _token_weights(weight_ptr, rows, M):
    """Load the weights of tokens: 0 for rows past M."""
    weight = (rows < M).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _loaded(x_ptr, rows, cols, weight, N):
    """Load the logits of tokens as float32: 0 for tokens of weight 0, and -inf past the last
    column, which changes no maximum, and adds 0 to a sum of exponentials."""
    mask = (weight != 0.0) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
    return tl.where(cols < N, x, -float("inf"))


@triton.jit
def _is_selected(x, cols, N, TOP_K: tl.constexpr, SHORT: tl.constexpr):
    """Return whether a logit is one of the TOP_K largest; of equal ones, the first are.

    The logits are compared as integers in the same order, whose last bits are the columns, so that
    no two are equal. SHORT: float16 and bfloat16 leave the last 13 bits of a float32 to the
    columns.
    """
    # Adding 0.0 makes 0.0 of -0.0, which is to equal it.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SHORT:
        LOWEST: tl.constexpr = -(2**31)
        key = (order & -8192) | (8191 - cols)
    else:
        LOWEST: tl.constexpr = -(2**63)
        key = (order.to(tl.int64) << 32) | (N - 1 - cols)
    key = tl.where(cols < N, key, LOWEST)
    for _ in range(TOP_K):
        key = tl.where(key == tl.max(key, 1)[:, None], LOWEST, key)
    return (key == LOWEST) & (cols < N)


@triton.jit(do_not_specialize=["M"])
def router_losses_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr,
    weight_ptr, probabilities_ptr, tokens_ptr, z_ptr,
    M, N,
    TOP_K: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # A program takes turns at the tiles of its layer, and keeps its sums in registers.
    x_ptr = _of_layer((x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr))
    cols = tl.arange(0, BLOCK_N)[None, :]
    program = tl.program_id(0).to(tl.int64)
    probabilities = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    tokens = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    z = tl.zeros((BLOCK_M, 1), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        weight = _token_weights(weight_ptr, rows, M)
        x = _loaded(x_ptr, rows, cols, weight, N)
        p, lse = softmax_and_lse(x)
        probabilities += weight * p
        z += weight * lse * lse
        tokens += tl.where(_is_selected(x, cols, N, TOP_K, SHORT), weight, 0.0)
    part = tl.program_id(1) * tl.num_programs(0) + program
    sums = part * N + cols
    tl.store(probabilities_ptr + sums, tl.sum(probabilities, 0)[None, :], mask=cols < N)
    tl.store(tokens_ptr + sums, tl.sum(tokens, 0)[None, :], mask=cols < N)
    tl.store(z_ptr + part, tl.sum(tl.sum(z, 1), 0))


@triton.jit(do_not_specialize=["M"])
def router_losses_backward_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr,
    dx0_ptr, dx1_ptr, dx2_ptr, dx3_ptr, dx4_ptr, dx5_ptr, dx6_ptr, dx7_ptr,
    weight_ptr, dprobabilities_ptr, dz_ptr,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    x_ptr = _of_layer((x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr))
    dx_ptr = _of_layer((dx0_ptr, dx1_ptr, dx2_ptr, dx3_ptr, dx4_ptr, dx5_ptr, dx6_ptr, dx7_ptr))
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    weight = _token_weights(weight_ptr, rows, M)
    p, lse = softmax_and_lse(_loaded(x_ptr, rows, cols, weight, N))
    slope = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if dprobabilities_ptr is not None:
        # As a vector: a tile of one row would make its layout that of all tiles.
        col = tl.arange(0, BLOCK_N)
        of_p = tl.load(dprobabilities_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        slope += of_p - tl.sum(p * of_p, 1)[:, None]
    if dz_ptr is not None:
        slope += 2 * tl.load(dz_ptr).to(tl.float32) * lse
    dx = tl.where(weight != 0.0, weight * p * slope, 0.0).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + rows * N + cols, dx, mask=(rows < M) & (cols < N))


def _plan(N: int) -> Tile:
    """Plan 16 elements a thread."""
    BLOCK_N = next_power_of_2(N)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    return Tile(BLOCK_N, min(1024, max(128, BLOCK_M * BLOCK_N // 16)), BLOCK_M)


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """Repeat the first tensor up to the LAYERS tensors that the kernels take. No program has the
    layer of a repeated one."""
    return tensors + tensors[:1] * (LAYERS - len(tensors))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@library.kernel("router_losses_forward", "cuda")
def forward(call: Any, probabilities: Tensor, z: Tensor, tokens: Tensor, plan: Plan | None) -> None:
    layers = [_rows(x) for x in call[:LAYERS] if x is not None]
    x = layers[0]
    M, N = x.shape
    plan = plan or _plan(N)
    tiles = cdiv(M, plan.BLOCK_M)
    # 8 programs a multiprocessor: 48 layers of (65536, 128) in bfloat16 take 1.33 ms on an H200,
    # and 1.45 with 4. The gradient has a program for each tile: 8 a multiprocessor take 5% less
    # time, but the whole step then takes more.
    programs = min(tiles, max(1, cdiv(8 * processors(x), len(layers))))
    parts = [partial_sums(sum, programs * len(layers)) for sum in (probabilities, tokens, z)]
    launch(
        router_losses_kernel, (programs, len(layers)), x,
        *_padded(layers), flat(call.token_weight), *parts,
        M, N,
        TOP_K=call.top_k, SHORT=x.element_size() == 2 and plan.BLOCK_N <= 8192,
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
        NUM_STAGES=pipeline_stages(x, plan.BLOCK_M * plan.BLOCK_N * x.element_size()),
    )  # fmt: skip
    of_probabilities, of_tokens, of_z = parts
    summed((of_probabilities, probabilities), (of_tokens, tokens))
    summed((of_z, z))


@library.kernel("router_losses_backward", "cuda")
def backward(call: Any, *gradients_and_plan: Any) -> None:
    *gradients, plan = gradients_and_plan
    layers = call[call._fields.index("x0") :]
    wanted = [(_rows(x), dx) for x, dx in zip(layers, gradients, strict=False) if dx is not None]
    x = wanted[0][0]
    M, N = x.shape
    plan = plan or _plan(N)
    launch(
        router_losses_backward_kernel, (cdiv(M, plan.BLOCK_M), len(wanted)), x,
        *_padded([x for x, _ in wanted]), *_padded([dx for _, dx in wanted]),
        flat(call.token_weight), flat(call.dprobabilities), call.dz,
        M, N,
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip
