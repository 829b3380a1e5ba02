"""multi_token_attention: kernels of p from scores, of the gradient of scores, and of the
convolution and its gradients where no key is after the query. Each of M rows is a query with L
scores, of which query i uses those of keys 0 to i.

A convolution is a matrix product. Its left factor is the weight, with a row for each channel of the
result and a column for each tap: a channel of x, and an offset of the query and of the key. Its
right factor are the values of x at these taps, with a column for each position of the result. A
program has BLOCK_J keys of a query and all channels of a group, and gathers BLOCK_K taps at a time.

2 x 4 x 8192 x 8192 with kernels of 3 x 3 take 2.6 ms on an H200, and the gradients 2.6 and 3.3;
cuDNN takes 14.2, 26.2 and 21.2, and computes the other half as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.attention.multi_token_attention import (
    CausalConvolution,
    probability,
    register,
    score_gradient,
)
from ...common.softmax.sparsemax_math import is_above, supported
from ...common.tensors import cdiv, next_power_of_2, unit_stride
from ...common.triton_math import LOWEST
from ..launch import TwoPass, WholeRow, launch, launch_whole_rows, plan_whole_rows, processors, rows
from ..softmax.sparsemax import row_maximum, row_tile, whole_sparsemax, wide_options, wide_threshold
from ..sums import partial_sums, summed, two_row_sums, two_totals


@dataclass(frozen=True)
class ConvolutionPlan:
    """The keys of a tile, the channels of the result, and the taps that are gathered at a time.

    As many taps as channels are two to five times faster than more or fewer taps.
    """

    BLOCK_J: int
    BLOCK_OUT: int
    BLOCK_K: int
    num_warps: int


# Plans by BLOCK_OUT, which is 16 or more in a product on tensor cores. Forward and backward of the
# op with kernels of 3 x 3 and 1 x C x 2048 x 2048 in bfloat16 on an H100, with these plans and with
# cuDNN, in ms: 17 channels 1.88 and 4.90, 32 2.69 and 5.07, 48 4.02 and 7.67, 64 5.29 and 7.58.
FORWARD = {
    16: ConvolutionPlan(128, 16, 16, 4),
    32: ConvolutionPlan(64, 32, 32, 4),
    64: ConvolutionPlan(64, 64, 64, 4),
}
WEIGHTS = {**FORWARD, 16: ConvolutionPlan(64, 16, 16, 2)}


@triton.jit
def _gather(
    x_ptr, k, K, i, first_j, N, stride_c, stride_i,
    KERNEL_I: tl.constexpr, KERNEL_J: tl.constexpr, DILATION_I: tl.constexpr,
    DILATION_J: tl.constexpr, BLOCK_J: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Load x at taps k of the query i and of BLOCK_J keys: 0 outside of x and, if CAUSAL, where the
    key is after the query."""
    row = (i + k // KERNEL_J % KERNEL_I * DILATION_I)[:, None]
    col = first_j + k % KERNEL_J * DILATION_J
    channel = (k // (KERNEL_I * KERNEL_J)).to(tl.int64)
    j = tl.arange(0, BLOCK_J)[None, :]
    pointers = (x_ptr + channel * stride_c + col)[:, None] + row.to(tl.int64) * stride_i + j
    last_j = first_j + BLOCK_J - 1 + (KERNEL_J - 1) * DILATION_J
    exists = (k < K)[:, None]
    inside = (i >= 0) & (i + (KERNEL_I - 1) * DILATION_I < N) & (first_j >= 0) & (last_j < N)
    if CAUSAL:
        inside = inside & (last_j <= i)
    # Most tiles are inside of x at all taps: they need no mask of positions.
    if inside:
        x = tl.load(pointers, mask=exists, other=0.0)
    else:
        key = col[:, None] + j
        mask = exists & (row >= 0) & (row < N) & (key >= 0) & (key < N)
        if CAUSAL:
            mask = mask & (key <= row)
        x = tl.load(pointers, mask=mask, other=0.0)
    return x


@triton.jit
def _convolution_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, N_x, N_y, channels, out, padding_i, padding_j,
    stride_b, stride_c, stride_i,
    KERNEL_I: tl.constexpr, KERNEL_J: tl.constexpr, DILATION_I: tl.constexpr,
    DILATION_J: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # channels and out are those of a group.
    tiles = tl.cdiv(N_y, BLOCK_J)
    row = tl.program_id(0) // tiles
    first_j = tl.program_id(0) % tiles * BLOCK_J
    i, batch = row % N_y, (row // N_y).to(tl.int64)
    group = tl.program_id(1)
    o = tl.arange(0, BLOCK_OUT)
    j = first_j + tl.arange(0, BLOCK_J)
    y_rows = ((batch * tl.num_programs(1) + group) * out + o) * N_y + i
    y_ptrs = y_ptr + (y_rows * N_y)[:, None] + j[None, :]
    mask = (o < out)[:, None] & (j < N_y)[None, :]
    if first_j > i:
        # All keys of the tile are after the query: y is 0 there. dp (CAUSAL) is not read there, and
        # not written.
        if not CAUSAL:
            tl.store(y_ptrs, tl.zeros((BLOCK_OUT, BLOCK_J), y_ptr.dtype.element_ty), mask=mask)
        return
    x_ptr += batch * stride_b + (group * channels).to(tl.int64) * stride_c
    K = channels * (KERNEL_I * KERNEL_J)
    weight_ptrs = weight_ptr + ((group * out + o) * K)[:, None]
    y = tl.zeros((BLOCK_OUT, BLOCK_J), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = _gather(
            x_ptr, k, K, i - padding_i, first_j - padding_j, N_x, stride_c, stride_i,
            KERNEL_I, KERNEL_J, DILATION_I, DILATION_J, BLOCK_J, CAUSAL,
        )  # fmt: skip
        taps = (o < out)[:, None] & (k < K)[None, :]
        weight = tl.load(weight_ptrs + k[None, :], mask=taps, other=0.0)
        y = tl.dot(weight, x.to(weight.dtype), y)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group * out + o, mask=o < out, other=0.0)
        y += bias.to(tl.float32)[:, None]
    y = tl.where((j <= i)[None, :], y, 0.0)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient_kernel(
    dy_ptr, x_ptr, dweight_ptr, dbias_ptr, batches, N_x, N_y, channels, out, padding_i, padding_j,
    stride_dyb, stride_dyc, stride_dyi, stride_b, stride_c, stride_i,
    KERNEL_I: tl.constexpr, KERNEL_J: tl.constexpr, DILATION_I: tl.constexpr,
    DILATION_J: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs along the first axis take turns at the queries of the batch. Each stores partial sums
    # of its chunk of taps and its group.
    K = channels * (KERNEL_I * KERNEL_J)
    start_k = tl.program_id(1) * BLOCK_K
    k = start_k + tl.arange(0, BLOCK_K)
    o = tl.arange(0, BLOCK_OUT)
    group = tl.program_id(2)
    dy_ptrs = dy_ptr + ((group * out + o).to(tl.int64) * stride_dyc)[:, None]
    x_ptr += (group * channels).to(tl.int64) * stride_c
    dweight = tl.zeros((BLOCK_OUT, BLOCK_K), tl.float32)
    dbias = tl.zeros((BLOCK_OUT,), tl.float32)
    for row in tl.range(tl.program_id(0), batches * N_y, tl.num_programs(0)):
        i, batch = row % N_y, (row // N_y).to(tl.int64)
        at = dy_ptrs + batch * stride_dyb + i.to(tl.int64) * stride_dyi
        for first_j in tl.range(0, i + 1, BLOCK_J):
            j = first_j + tl.arange(0, BLOCK_J)[None, :]
            # dy may hold anything where the key is after the query.
            dy = tl.load(at + j, mask=(o < out)[:, None] & (j <= i), other=0.0)
            x = _gather(
                x_ptr + batch * stride_b, k, K, i - padding_i, first_j - padding_j, N_x,
                stride_c, stride_i,
                KERNEL_I, KERNEL_J, DILATION_I, DILATION_J, BLOCK_J, False,
            )  # fmt: skip
            dweight = tl.dot(dy.to(x.dtype), tl.trans(x), dweight)
            if dbias_ptr is not None:
                dbias += tl.sum(dy.to(tl.float32), 1)
    row = (tl.program_id(0) * tl.num_programs(2) + group) * out + o
    mask = (o < out)[:, None] & (k < K)[None, :]
    tl.store(dweight_ptr + (row * K)[:, None] + k[None, :], dweight, mask=mask)
    # Every chunk of taps has the same sums of dy: the first stores them.
    if dbias_ptr is not None:
        tl.store(dbias_ptr + row, dbias, mask=o < tl.where(start_k == 0, out, 0))


class KernelConvolution(CausalConvolution):
    """The convolution by these kernels, for weights in bfloat16 and float16, a stride of 1, and
    groups of at most 64 channels: with more, cuDNN is faster."""

    def takes(self, weight: Tensor) -> bool:
        groups_fit = max(weight.shape[0] // self.groups, weight.shape[1]) <= max(FORWARD)
        halves = weight.dtype in (torch.bfloat16, torch.float16)
        return halves and groups_fit and self.stride == [1, 1]

    def forward(self, p: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        N, _ = self.sizes(p.shape[2:], weight.shape[2:])
        y = p.new_empty((len(p), len(weight), N, N))
        self._launch(p, weight, bias, y, self.padding, CAUSAL=False)
        return y

    def masked(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy itself: the kernels do not read it where the key is after the query."""
        return unit_stride(dy)

    def gradient_of_input(self, dy: Tensor, weight: Tensor, L: int) -> Tensor:
        """Return dp, which may be uninitialised where the key is after the query.

        It is the convolution of dy with the kernels flipped, and their input and output channels
        exchanged.
        """
        kernel = weight.shape[2:]
        flipped = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flip(3, 4)
        flipped = flipped.flatten(0, 1).contiguous()
        dp = weight.new_empty((len(dy), len(flipped), L, L))
        options = zip(kernel, self.dilation, self.padding, strict=True)
        padding = [(size - 1) * dilation - pad for size, dilation, pad in options]
        self._launch(dy, flipped, None, dp, padding, CAUSAL=True)
        return dp

    def gradients_of_weights(
        self, dy: Tensor, p: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, channels, *kernel = len(weight) // self.groups, *weight.shape[1:]
        plan, N = WEIGHTS[_block_out(out)], dy.shape[-1]
        blocks = cdiv(channels * kernel[0] * kernel[1], plan.BLOCK_K)
        programs = min(len(p) * N, max(1, 8 * processors(p) // (blocks * self.groups)))
        dweight = torch.empty(weight.shape, dtype=torch.float32, device=p.device)
        dbias = dweight.new_empty(len(weight)) if bias else None
        parts, bias_parts = partial_sums(dweight, programs), partial_sums(dbias, programs)
        launch(
            _weight_gradient_kernel, (programs, blocks, self.groups), p,
            dy, p, parts, bias_parts, len(p), p.shape[-1], N, channels, out, *self.padding,
            *dy.stride()[:3], *p.stride()[:3],
            **self._constants(kernel), **vars(plan),
        )  # fmt: skip
        summed((parts, dweight))
        summed((bias_parts, dbias))
        return dweight, dbias

    def _launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, padding: list[int], *,
        CAUSAL: bool,
    ) -> None:  # fmt: skip
        out, channels, *kernel = len(weight) // self.groups, *weight.shape[1:]
        plan, N = FORWARD[_block_out(out)], y.shape[-1]
        launch(
            _convolution_kernel, (len(x) * N * cdiv(N, plan.BLOCK_J), self.groups), x,
            x, weight, bias, y, x.shape[-1], N, channels, out, *padding, *x.stride()[:3],
            **self._constants(kernel), **vars(plan), CAUSAL=CAUSAL,
        )  # fmt: skip

    def _constants(self, kernel: list[int]) -> dict[str, int]:
        names = ("KERNEL_I", "KERNEL_J", "DILATION_I", "DILATION_J")
        return dict(zip(names, [*kernel, *self.dilation], strict=True))


def _block_out(out: int) -> int:
    """Return the BLOCK_OUT of a plan for `out` channels."""
    return max(min(FORWARD), next_power_of_2(out))


@triton.jit
def _whole_probabilities(x, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute p of whole rows. Scores that a query does not use are -inf."""
    if SPARSE:
        return whole_sparsemax(x, BLOCK_M)
    else:
        maximum = tl.maximum(tl.max(x, 1), LOWEST)[:, None]
        exp = tl.exp(x - maximum)
        return exp * (1.0 / tl.sum(exp, 1)[:, None])


@triton.jit(do_not_specialize=["M"])
def causal_kernel(
    x_ptr, p_ptr, M, L, stride_x,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    # row % L is the query. p is written for all keys, and is 0 for those after the query.
    inside = (rows < M) & (cols <= rows % L)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=-float("inf")).to(tl.float32)
    p = _whole_probabilities(x, SPARSE, BLOCK_M)
    mask = (rows < M) & (cols < L)
    tl.store(p_ptr + rows * L + cols, p.to(p_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def causal_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, stride_dp, stride_x,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a program has read its rows before it writes them.
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (cols <= rows % L)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=inside, other=-float("inf")).to(tl.float32)
    dp = tl.load(dp_ptr + rows * stride_dp + cols, mask=inside, other=0.0).to(tl.float32)
    p = _whole_probabilities(x, SPARSE, BLOCK_M)
    if SPARSE:
        sum, count = two_row_sums(supported(dp, p), is_above(p, 0.0))
        mean = sum / count
    else:
        mean = tl.sum(p * dp, 1)[:, None]
    dx = score_gradient(dp, p, mean, SPARSE)
    mask = (rows < M) & (cols < L)
    tl.store(dx_ptr + rows * L + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_totals(x_ptr, N, SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr):
    """Compute the maximum and the total (see `probability`) of a row of N scores that is wider than
    a tile."""
    maximum = row_maximum(x_ptr, N, BLOCK_N)
    if SPARSE:
        total = wide_threshold(x_ptr, N, maximum, BLOCK_N, FOLD)
    else:
        maximum = tl.maximum(maximum, LOWEST)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.range(0, N, BLOCK_N, num_stages=1):
            x = row_tile(x_ptr, start + tl.arange(0, BLOCK_N), N, -float("inf"))
            sums += tl.exp(x - maximum)
        total = tl.sum(sums, 0)
    return maximum, total


@triton.jit(do_not_specialize=["M"])
def causal_wide_kernel(
    x_ptr, p_ptr, M, L, stride_x,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # A program has one row.
    row = tl.program_id(0).to(tl.int64)
    keys = (row % L + 1).to(tl.int32)
    x_ptr += row * stride_x
    maximum, total = _wide_totals(x_ptr, keys, SPARSE, BLOCK_N, FOLD)
    for start in tl.range(0, L, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        x = row_tile(x_ptr, cols, keys, -float("inf"))
        p = probability(x, maximum, total, SPARSE)
        tl.store(p_ptr + row * L + cols, p.to(p_ptr.dtype.element_ty), mask=cols < L)


@triton.jit(do_not_specialize=["M"])
def causal_wide_backward_kernel(
    dp_ptr, x_ptr, dx_ptr, M, L, stride_dp, stride_x,
    SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    # dx may be dp: a tile of it is written after the last time that it is read.
    row = tl.program_id(0).to(tl.int64)
    keys = (row % L + 1).to(tl.int32)
    dp_ptr += row * stride_dp
    x_ptr += row * stride_x
    maximum, total = _wide_totals(x_ptr, keys, SPARSE, BLOCK_N, FOLD)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    counts = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, keys, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        dp = row_tile(dp_ptr, cols, keys, 0.0)
        p = probability(row_tile(x_ptr, cols, keys, -float("inf")), maximum, total, SPARSE)
        if SPARSE:
            sums += supported(dp, p)
            counts += is_above(p, 0.0)
        else:
            sums += p * dp
    if SPARSE:
        sum, count = two_totals(sums, counts)
        mean = sum / count
    else:
        mean = tl.sum(sums, 0)
    for start in tl.range(0, L, BLOCK_N, num_stages=1):
        cols = start + tl.arange(0, BLOCK_N)
        dp = row_tile(dp_ptr, cols, keys, 0.0)
        p = probability(row_tile(x_ptr, cols, keys, -float("inf")), maximum, total, SPARSE)
        dx = score_gradient(dp, p, mean, SPARSE)
        tl.store(dx_ptr + row * L + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < L)


def plan_forward(L: int) -> WholeRow | TwoPass:
    """Plan whole rows up to 32768 scores, of which 1024 threads hold 32 float32 each."""
    return plan_whole_rows(L, 1024) if L <= 32768 else TwoPass(8192, 512)


def plan_backward(L: int) -> WholeRow | TwoPass:
    """Plan whole rows up to 16384 scores, of which 1024 threads hold 16 float32 each of p, and as
    many of dp."""
    return plan_whole_rows(L, 1024) if L <= 16384 else TwoPass(8192, 512)


def launch_forward(
    scores: Tensor, p: Tensor, sparse: bool, plan: WholeRow | TwoPass | None = None
) -> None:
    x = rows(scores)
    M, L = x.shape
    plan = plan or plan_forward(L)
    arguments = (x, p, M, L, x.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(causal_kernel, plan, x, *arguments, SPARSE=sparse)
    else:
        options = wide_options(plan, x)
        launch(causal_wide_kernel, (M,), x, *arguments, SPARSE=sparse, **options)


def launch_backward(
    dp: Tensor, scores: Tensor, dscores: Tensor, sparse: bool,
    plan: WholeRow | TwoPass | None = None,
) -> None:  # fmt: skip
    """Launch the kernel of the gradient of scores; dscores may be dp."""
    dp, x = rows(dp), rows(scores)
    M, L = x.shape
    plan = plan or plan_backward(L)
    arguments = (dp, x, dscores, M, L, dp.stride(0), x.stride(0))
    if isinstance(plan, WholeRow):
        launch_whole_rows(causal_backward_kernel, plan, x, *arguments, SPARSE=sparse)
    else:
        options = wide_options(plan, x)
        launch(causal_wide_backward_kernel, (M,), x, *arguments, SPARSE=sparse, **options)


register("cuda", launch_forward, launch_backward, KernelConvolution)
