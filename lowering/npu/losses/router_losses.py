"""router_losses. M tokens, N experts; a launch for each layer. For rows that fit no tile, of more
than 2048 logits, the definition runs."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.losses.router_losses import LAYERS
from ...common.definition import fill_by_definition
from ...common.losses.loss_math import softmax_and_lse
from ...common.tensors import cdiv, flat
from ...common.triton_math import LOWEST
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tile import load, load_logits, remaining, tile_offsets, within
from ..tiling import COSTS, Cost, Plan, launch

# whole (1, 2048): 84.5%, (8, 128): 47.9%.
COSTS["router_losses"] = Cost({2: 81.2, 4: 81.2}, {2: 81.2, 4: 81.2})
# whole (1, 2048): 44.1%, (8, 128): 22.1%.
COSTS["router_losses_backward"] = Cost({2: 45, 4: 45}, {2: 45, 4: 45})


@triton.jit
def _weights_and_logits(x_ptr, weight_ptr, row, rows, cols, offsets, M, N, BLOCK_M: tl.constexpr):
    """Load the tokens' weights and logits.

    Rows beyond M have the weight 0. The logits of tokens with the weight 0 are 0, because they may
    be NaN; those of others are -inf beyond N.
    """
    count = remaining(M, row, BLOCK_M)
    weight = within(rows, count)
    if weight_ptr is not None:
        weight = load(weight_ptr + row, rows, rows < count)
    x = load_logits(x_ptr + row * N, offsets, (rows < count) & (cols < N))
    return weight, tl.where(weight != 0.0, x, 0.0)


@triton.jit
def _without_largest(x, cols, TOP_K: tl.constexpr):
    """Return x with its TOP_K largest logits replaced by -inf, and no other element -inf.

    Of equal logits the first is taken. Columns beyond the row are LOWEST and come last, so that
    they are not taken.
    """
    # Indices as float32, which holds them exactly below 2**24.
    numbers = cols.to(tl.float32)
    x = tl.maximum(x, LOWEST)
    for _ in range(TOP_K):
        largest = tl.max(x, axis=1)[:, None]
        first = tl.min(tl.where(x == largest, numbers, 16777216.0), axis=1)[:, None]
        x = tl.where(numbers == first, -float("inf"), x)
    return x


@triton.jit(do_not_specialize=["M"])
def _router_losses_kernel(
    x_ptr, weight_ptr, probabilities_ptr, tokens_ptr, z_ptr, M, N,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    probabilities = tl.zeros((1, BLOCK_N), tl.float32)
    tokens = tl.zeros((1, BLOCK_N), tl.float32)
    z = tl.zeros((BLOCK_M, 1), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        weight, x = _weights_and_logits(
            x_ptr, weight_ptr, tile * BLOCK_M, rows, cols, offsets, M, N, BLOCK_M
        )
        p, lse = softmax_and_lse(x)
        probabilities += tl.sum(weight * p, axis=0)[None, :]
        z += weight * lse * lse
        # The selected experts are those that are -inf afterwards.
        left = _without_largest(x, cols, TOP_K)
        tokens += tl.sum(tl.where(left == -float("inf"), weight, 0.0), axis=0)[None, :]
    tl.store(probabilities_ptr + program * N + cols, probabilities, mask=cols < N)
    tl.store(tokens_ptr + program * N + cols, tokens, mask=cols < N)
    tl.store(z_ptr + program * BLOCK_M + rows, z)


@triton.jit(do_not_specialize=["M"])
def _router_losses_backward_kernel(
    x_ptr, weight_ptr, dprobabilities_ptr, dz_ptr, dx_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(N, BLOCK_M, BLOCK_N)
    if dprobabilities_ptr is not None:
        of_p = load(dprobabilities_ptr, cols, cols < N)
    if dz_ptr is not None:
        dz = tl.load(dz_ptr).to(tl.float32)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        weight, x = _weights_and_logits(x_ptr, weight_ptr, row, rows, cols, offsets, M, N, BLOCK_M)
        p, lse = softmax_and_lse(x)
        slope = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if dprobabilities_ptr is not None:
            slope += of_p - tl.sum(p * of_p, axis=1)[:, None]
        if dz_ptr is not None:
            slope += 2.0 * dz * lse
        dx = tl.where(weight != 0.0, weight * p * slope, 0.0).to(dx_ptr.dtype.element_ty)
        mask = (rows < remaining(M, row, BLOCK_M)) & (cols < N)
        tl.store(dx_ptr + row * N + offsets, dx, mask=mask)


@library.kernel("router_losses_forward", "npu")
def forward(call: Any, probabilities: Tensor, z: Tensor, tokens: Tensor, plan: Plan | None) -> None:
    layers = [tiling.rows(x) for x in call[:LAYERS] if x is not None]
    M, N = layers[0].shape
    plan = plan or tiling.plan("router_losses", N, layers[0])
    if not plan.whole(N):
        fill_by_definition("router_losses_forward", call, (probabilities, z, tokens))
        return
    # Each program of each layer stores its own sums: layers share no memory, and no atomics.
    programs = plan.programs(cdiv(M, plan.BLOCK_M))
    parts = [partial_sums(sum, programs * len(layers)) for sum in (probabilities, tokens)]
    parts.append(z.new_empty(programs * len(layers), plan.BLOCK_M))
    of_layers = zip(*(part.chunk(len(layers)) for part in parts), strict=True)
    weight = flat(call.token_weight)
    for x, of_layer in zip(layers, of_layers, strict=True):
        launch(_router_losses_kernel, plan, programs, x, weight, *of_layer, M, N, TOP_K=call.top_k)
    *of_experts, of_rows = parts
    for part, sum in zip(of_experts, (probabilities, tokens), strict=True):
        summed(part, sum)
    z.copy_(of_rows.sum())


@library.kernel("router_losses_backward", "npu")
def backward(call: Any, *gradients_and_plan: Any) -> None:
    *gradients, plan = gradients_and_plan
    N = call.x0.shape[-1]
    plan = plan or tiling.plan("router_losses_backward", N, call.x0)
    if not plan.whole(N):
        fill_by_definition("router_losses_backward", call, tuple(gradients))
        return
    weight, of_p = flat(call.token_weight), flat(call.dprobabilities)
    layers = call[call._fields.index("x0") :]
    for x, dx in zip(layers, gradients, strict=False):
        if dx is not None:
            x = tiling.rows(x)
            launch(
                _router_losses_backward_kernel, plan, cdiv(len(x), plan.BLOCK_M),
                x, weight, of_p, call.dz, dx, *x.shape,
            )  # fmt: skip
