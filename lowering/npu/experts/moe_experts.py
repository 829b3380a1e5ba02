"""moe_experts on NPUs: npu_grouped_matmul of torch_npu, and kernels between its products.

PyTorch sorts the ids of experts, and gathers rows of tokens. The rows of sentinels (ids that are no
expert) are behind those of experts. The products leave them undefined, and no kernel reads them.

The groups of a product are given by the index behind the last row of each, int64, for at most 1024
groups. Rows behind the last group have undefined results in `product_of_rows`, and
`product_over_rows` leaves them out. A group without rows has the result 0 there. torch_npu
documents rows behind the last group for its newest devices alone; the kernels of all devices allow
them (gmm/grouped_matmul of cann/ops-transformer).

For each row, with D hidden and I intermediate columns, the kernels of a gated activation move 3I +
D elements of x's dtype in the forward, and 6I + D in the backward. PyTorch's operations move 5I +
11D in the forward, because their weighted sum is in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.experts import rows
from ....record import Op
from ...common.activations.activation_math import gated, gated_gradients, relu
from ...common.activations.activations import parts, row_stride
from ...common.experts.moe_experts import activation_of
from ...common.tensors import cdiv
from .. import tiling
from ..activations.activations import load as load_part
from ..activations.activations import load_gate_and_up, store
from ..tile import load, remaining
from ..tiling import COSTS, Cost, launch


def product_of_rows(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight[e] + bias[e] of each group e: (n, K), (E, K, N), (E, N) -> (n, N)."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()
    if bias is not None and bias.dtype is not torch.float16:
        # The op takes a float16 bias with float16, and a float32 bias with bfloat16.
        bias = bias.float()
    return _grouped_matmul(x, weight, ends, group_type=0, bias=bias)


def product_over_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a.T @ b over the rows of each group: (n, P), (n, Q) -> (E, P, Q)."""
    return _grouped_matmul(a.t(), b, ends, group_type=2)


def _grouped_matmul(
    x: Tensor, weight: Tensor, ends: Tensor, group_type: int, bias: Tensor | None = None
) -> Tensor:
    # group_type: 0 for groups of x's rows, 2 for groups of the summed dimension.
    # split_item=3: the result is one tensor. group_list_type=0: groups are given by their ends.
    options: dict[str, Any] = {} if bias is None else {"bias": [bias.contiguous()]}
    results = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], **options, group_list=ends, group_type=group_type, group_list_type=0,
        split_item=3,
    )  # fmt: skip
    product: Tensor = results[0]
    return product


COSTS.update(
    {
        # (1, 4096): 41.7%, (1, 8192): 83.4%.
        "moe_combine": Cost({}, {2: 20.1, 4: 20.1}),
        # clamped_swiglu (1, 1024): 45.0%, (1, 2048): 90.1%.
        "moe_slopes": Cost({}, {2: 86.5, 4: 86.5}),
        # clamped_swiglu (1, 1024): 74.4%.
        "interleaved_moe_slopes": Cost({}, {2: 143, 4: 143}),
    }
)
# Columns of ones, or of weights, in a product that sums rows: a cube core pads fewer to 16.
SUM_COLUMNS = 16


@triton.jit(do_not_specialize=["M", "E", "top_k"])
def _moe_combine_kernel(
    rows_ptr, places_ptr, weights_ptr, offsets_ptr, y_ptr, M, N, E, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows in order, times their weights if any, without those of sentinels."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    across = tl.cdiv(N, BLOCK_N)
    end = tl.load(offsets_ptr + E)
    for item in tl.range(tl.program_id(0).to(tl.int64), M * across, tl.num_programs(0)):
        token = item // across
        col = item % across * BLOCK_N
        inside = remaining(N, col, BLOCK_N)
        total = tl.zeros((1, BLOCK_N), tl.float32)
        for k in tl.range(0, top_k):
            # A row from `end` on is a sentinel's: the whole tile is masked off and adds 0.
            row = tl.load(places_ptr + token * top_k + k)
            mask = cols < tl.where(row < end, inside, 0)
            values = load(rows_ptr + row.to(tl.int64) * N + col, cols, mask)
            if weights_ptr is not None:
                values *= tl.load(weights_ptr + token * top_k + k)
            total += values
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + token * N + col + cols, y, mask=cols < inside)


@triton.jit(do_not_specialize=["M", "E"])
def _moe_slopes_kernel(
    da_ptr, gate_ptr, up_ptr, weights_ptr, offsets_ptr, dgate_ptr, dup_ptr, act_ptr, dweights_ptr,
    M, N, E, stride, stride_gradients, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of gate and up, act and dweights from da, the unweighted gradient of
    the activation's result.

    The gradients are weight * da through the activation's slopes. act is weight * activation, and
    dweights the sum of da * activation over the columns. `stride` is that of gate's and up's rows.
    """
    rows = tl.arange(0, BLOCK_M)[:, None]
    end = tl.load(offsets_ptr + E)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        exists = rows < remaining(M, row, BLOCK_M)
        weight = load(weights_ptr + row, rows, exists)
        # Rows from `end` on are sentinels': loaded as 0, so that their gradients are 0.
        total = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, N, BLOCK_N):
            da = load_part(da_ptr, row, col, end, N, N, BLOCK_M, BLOCK_N)
            if ACTIVATION == "relu_squared":
                gate = relu(load_part(gate_ptr, row, col, end, N, stride, BLOCK_M, BLOCK_N))
                act = gate * gate
                dgate = (da * weight) * (2.0 * gate)
                store(dgate_ptr, row, col, M, N, stride_gradients, dgate, BLOCK_M, BLOCK_N)
            else:
                gate, up = load_gate_and_up(
                    gate_ptr, up_ptr, row, col, end, N, stride, stride, INTERLEAVED,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
                act = gated(gate, up, a, b, c, ACTIVATION)
                dgate, dup = gated_gradients(da * weight, gate, up, a, b, c, ACTIVATION)
                if INTERLEAVED:
                    pairs = tl.interleave(dgate, dup)
                    store(
                        dgate_ptr, row, col * 2, M, N * 2, stride_gradients, pairs,
                        BLOCK_M, BLOCK_N * 2,
                    )  # fmt: skip
                else:
                    store(dgate_ptr, row, col, M, N, stride_gradients, dgate, BLOCK_M, BLOCK_N)
                    store(dup_ptr, row, col, M, N, stride_gradients, dup, BLOCK_M, BLOCK_N)
            if act_ptr is not None:
                store(act_ptr, row, col, M, N, N, act * weight, BLOCK_M, BLOCK_N)
            if dweights_ptr is not None:
                total += tl.sum(da * act, axis=1)[:, None]
        if dweights_ptr is not None:
            tl.store(dweights_ptr + row + rows, total, mask=exists)


class _Rows(rows.ExpertRows):
    """The rows of a call's experts, with the products and kernels of an NPU."""

    def product_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product_of_rows(x, weight.mT, self.ends, bias)

    def product_over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        return product_over_rows(a, b, self.ends)

    def sums(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows of each expert, times their weights if any, as a column of a product."""
        column = rows.new_ones(len(rows)) if weights is None else weights.to(rows.dtype)
        columns = column.unsqueeze(1).expand(-1, SUM_COLUMNS).contiguous()
        # By way of one dimension, for the strides of a single expert.
        return self.product_over_rows(columns, rows)[:, 0].flatten().view(self.E, -1)

    @cached_property
    def ends(self) -> Tensor:
        return self.offsets[1:].long()

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows of each token, times their weights if any."""
        T, K = self.exists.shape
        N = rows.shape[1]
        y = rows.new_empty(T, N)
        plan = tiling.plan("moe_combine", N, rows)
        launch(
            _moe_combine_kernel, plan, T * cdiv(N, plan.BLOCK_N),
            rows, self.places, weights, self.offsets, y,
            T, N, self.E, K,
        )  # fmt: skip
        return y

    def implementation(self, op: Op) -> Callable[..., Tensor]:
        return op.kernels["npu"]

    def slopes(
        self, da: Tensor, h: Tensor, wants_act: bool, wants_dweights: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        M, N = da.shape
        h = h.contiguous()
        dh, act = torch.empty_like(h), torch.empty_like(da) if wants_act else None
        dweights = da.new_empty(M, dtype=torch.float32) if wants_dweights else None
        activation, scalars = activation_of(self.call)
        # Whether gate and up are not two halves of h's columns.
        interleaved = self.call.interleaved
        whole = interleaved or activation == "relu_squared"
        op = "interleaved_moe_slopes" if interleaved else "moe_slopes"
        plan = tiling.elementwise_plan(op, M, N, da)
        (gate, up), (dgate, dup) = (parts(tensor, None, whole) for tensor in (h, dh))
        launch(
            _moe_slopes_kernel, plan, cdiv(M, plan.BLOCK_M),
            da, gate, up, self.by_expert(self.weights), self.offsets, dgate, dup, act, dweights,
            M, N, self.E, row_stride(gate), row_stride(dgate), *scalars,
            ACTIVATION=activation, INTERLEAVED=interleaved,
        )  # fmt: skip
        return dh, act, dweights


# allocates=True, because npu_grouped_matmul allocates products.
@library.kernel("moe_experts_forward", "npu", allocates=True)
def moe_experts_forward(call: Any) -> tuple[Tensor | None, ...]:
    if call.top_k_index.numel() == 0:
        outputs = library.allocate("moe_experts_forward", call)
        return tuple(None if output is None else output.zero_() for output in outputs)
    # float32 holds the ids exactly. torch_npu sorts int64 on a CPU.
    order, offsets = rows.sort(call.top_k_index, call.down.shape[0], torch.float32)
    return _Rows(call, order, offsets).results()


@library.kernel("moe_experts_backward", "npu", allocates=True)
def moe_experts_backward(call: Any) -> tuple[Tensor | None, ...]:
    if call.order.numel() == 0:
        outputs = library.allocate("moe_experts_backward", call)
        return tuple(None if output is None else output.zero_() for output in outputs)
    return _Rows(call, call.order, call.offsets).gradients()
