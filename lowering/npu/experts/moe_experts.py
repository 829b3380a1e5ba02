"""moe_experts on NPUs: npu_grouped_matmul, and kernels between its products.

PyTorch sorts the ids of experts, and gathers rows of tokens. The rows of sentinels are behind those
of experts. The products leave them undefined, and no kernel reads them.

For each row, of D and I columns, the kernels of a gated activation move 3I + D elements of x's
dtype in the forward, and 6I + D in the backward. PyTorch's operations move 5I + 11D in the forward,
because their weighted sum is of float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.experts.moe_experts import ACTIVATIONS
from ....ops.experts.route import sort
from ....ops.strides import is_transposed
from ...common.activations.elementwise import parts, row_stride
from ...common.experts.moe_experts import activation_of, add_biases
from ...common.sizes import cdiv
from ...common.triton_math import gated, gated_gradients, relu
from .. import tiling
from ..activations.elementwise import load as load_part
from ..activations.elementwise import store
from ..activations.gated import load_gate_and_up
from ..tile import load, remaining
from ..tiling import COSTS, Cost, launch
from .grouped_matmul import product_of_rows, product_over_rows

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
# The columns of a product that sums rows: fewer are padded by a cube core.
SUMS = 16


@triton.jit(do_not_specialize=["M", "E", "top_k"])
def _moe_combine_kernel(
    rows_ptr, places_ptr, weights_ptr, offsets_ptr, y_ptr, M, N, E, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of each token's rows, in order, without those of sentinels; times their weights, if
    there are weights."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    across = tl.cdiv(N, BLOCK_N)
    end = tl.load(offsets_ptr + E)
    for item in tl.range(tl.program_id(0).to(tl.int64), M * across, tl.num_programs(0)):
        token = item // across
        col = item % across * BLOCK_N
        inside = remaining(N, col, BLOCK_N)
        total = tl.zeros((1, BLOCK_N), tl.float32)
        for k in tl.range(0, top_k):
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
    """The gradients of gate and up = the row's weight times da through the activation's slopes,
    act = the weight times the activation, and dweights = the sum of da times the activation.
    `stride` is that of the rows of gate and up."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    end = tl.load(offsets_ptr + E)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        exists = rows < remaining(M, row, BLOCK_M)
        weight = load(weights_ptr + row, rows, exists)
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


class _Rows:
    """The rows of a call's experts: their order, and what follows from it."""

    def __init__(self, call: Any, order: Tensor, offsets: Tensor) -> None:
        """order is int32."""
        self.call, self.order, self.offsets = call, order, offsets
        self.top_k = call.top_k_index.shape[1]
        self.ends = offsets[1:].long()
        # A row's place in the order, by token.
        numbers = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
        self.places = torch.empty_like(numbers).scatter_(0, order.long(), numbers)
        # A sentinel's weight may be anything.
        exists = (call.top_k_index >= 0) & (call.top_k_index < offsets.numel() - 1)
        self.weights = call.top_k_weights.float().where(exists, 0.0).contiguous()

    def of_tokens(self, x: Tensor) -> Tensor:
        """The rows of tokens, by expert."""
        return x.index_select(0, self.order // self.top_k)

    def up(self) -> Tensor:
        return self.project("gate_up", self.of_tokens(self.call.x))

    def project(self, name: str, x: Tensor) -> Tensor:
        """x times the transposed weight of this name, with its bias and its LoRA."""
        weight, bias, lora_b = self.named(name, "", "_bias", "_lora_b")
        y = product_of_rows(x, weight.mT, self.ends, bias)
        if lora_b is not None:
            y += product_of_rows(self.low_rank(name, x), lora_b.mT, self.ends)
        return y

    def project_back(self, name: str, dy: Tensor) -> Tensor:
        """dy times the weight of this name, and its LoRA."""
        weight, lora_a = self.named(name, "", "_lora_a")
        dx = product_of_rows(dy, weight, self.ends)
        if lora_a is not None:
            dx += product_of_rows(self.low_rank_gradient(name, dy), lora_a, self.ends)
        return dx

    def low_rank(self, name: str, x: Tensor) -> Tensor:
        a, scale = self.named(name, "_lora_a", "_lora_scale")
        return product_of_rows(x, a.mT, self.ends) * scale

    def low_rank_gradient(self, name: str, dy: Tensor) -> Tensor:
        b, scale = self.named(name, "_lora_b", "_lora_scale")
        return product_of_rows(dy, b, self.ends) * scale

    def named(self, name: str, *parts: str) -> list[Any]:
        return [getattr(self.call, name + part) for part in parts]

    def fill_lora(
        self, name: str, da: Tensor | None, db: Tensor | None, dy: Tensor, x: Tensor | None
    ) -> None:
        """Fill the gradients of the LoRA of this name, which are of any strides."""
        if da is not None and x is not None:
            da.copy_(product_over_rows(self.low_rank_gradient(name, dy), x, self.ends))
        if db is not None and x is not None:
            db.copy_(product_over_rows(dy, self.low_rank(name, x), self.ends))

    def combine(self, rows: Tensor, weights: Tensor | None, y: Tensor) -> None:
        """Fill y with each token's sum of rows."""
        T, N = y.shape
        plan = tiling.plan("moe_combine", N, rows)
        launch(
            _moe_combine_kernel, plan, T * cdiv(N, plan.BLOCK_N),
            rows, self.places, weights, self.offsets, y,
            T, N, self.ends.numel(), self.top_k,
        )  # fmt: skip

    def slopes(
        self, da: Tensor, pre: Tensor, dpre: Tensor, act: Tensor | None, dweights: Tensor | None
    ) -> None:
        """Fill dpre, act and dweights, the gradient of each row's weight as far as it comes from
        activations."""
        M, N = da.shape
        activation, scalars = activation_of(self.call)
        interleaved = self.call.interleaved
        whole = interleaved or activation == "relu_squared"
        op = "interleaved_moe_slopes" if interleaved else "moe_slopes"
        plan = tiling.elementwise_plan(op, M, N, da)
        (gate, up), (dgate, dup) = (parts(tensor, None, whole) for tensor in (pre, dpre))
        launch(
            _moe_slopes_kernel, plan, cdiv(M, plan.BLOCK_M),
            da, gate, up, self.by_expert(self.weights), self.offsets, dgate, dup, act, dweights,
            M, N, self.ends.numel(), row_stride(gate), row_stride(dgate), *scalars,
            ACTIVATION=activation, INTERLEAVED=interleaved,
        )  # fmt: skip

    def by_expert(self, values: Tensor) -> Tensor:
        """Numbers (T, K), in the order of the experts' rows."""
        return values.flatten().index_select(0, self.order)


def _activated(call: Any, h: Tensor) -> Tensor:
    """The activation of h, by its op."""
    name, options = ACTIVATIONS[call.activation]
    activate = library.OPS[name].kernels["npu"]
    if name == "relu_squared":
        return activate(h)
    if name == "clamped_swiglu":
        return activate(h, None, call.alpha, call.limit, call.up_offset, call.interleaved)
    # The op splits halves, and a pair's gate and up are copied.
    gate, up = (h[:, ::2], h[:, 1::2]) if call.interleaved else (h, None)
    return activate(gate, up, *options)


# allocates=True, because npu_grouped_matmul allocates the pre-activation and weights' gradients.
@library.kernel("moe_experts_forward", "npu", allocates=True)
def moe_experts_forward(call: Any) -> tuple[Tensor | None, ...]:
    without = call._replace(return_pre_activation=False)
    y, order, offsets, _ = library.allocate("moe_experts_forward", without)
    pre = call.x.new_empty(0, call.gate_up.shape[1])
    if order.numel() == 0:
        y.zero_()
        offsets.zero_()
    else:
        # float32 holds the ids exactly. torch_npu sorts int64 on a CPU.
        found = sort(call.top_k_index, call.down.shape[0], torch.float32)
        order.copy_(found[0])
        offsets.copy_(found[1])
        rows = _Rows(call, order, offsets)
        pre = rows.up()
        rows.combine(rows.project("down", _activated(call, pre)), rows.weights, y)
    return y, order, offsets, pre if call.return_pre_activation else None


@library.kernel("moe_experts_backward", "npu", allocates=True)
def moe_experts_backward(call: Any) -> tuple[Tensor | None, ...]:
    outputs = list(library.allocate("moe_experts_backward", call))
    if call.order.numel() == 0:
        return tuple(None if output is None else output.zero_() for output in outputs)
    rows, dy = _Rows(call, call.order, call.offsets), call.dy.contiguous()
    dy_rows = rows.of_tokens(dy)
    _sum_rows(rows, outputs[5], dy_rows, rows.by_expert(rows.weights).to(dy.dtype))
    if all(output is None for output in (*outputs[:5], *outputs[6:])):
        return tuple(outputs)
    pre = rows.up() if call.pre_activation is None else call.pre_activation.contiguous()
    da = rows.project_back("down", dy_rows)
    dpre, dx, dtop_k_weights = torch.empty_like(pre), outputs[0], outputs[3]
    wants_act = any(output is not None for output in (outputs[2], *outputs[8:]))
    act = torch.empty_like(da) if wants_act else None
    dweights = None if dtop_k_weights is None else da.new_empty(len(da), dtype=torch.float32)
    rows.slopes(da, pre, dpre, act, dweights)
    del da, pre
    if dtop_k_weights is not None and dweights is not None:
        dweights = dweights.index_select(0, rows.places).view(dtop_k_weights.shape)
        add_biases(call, dy, dweights)
        dtop_k_weights.copy_(dweights)
    rows.fill_lora("down", *outputs[8:], dy_rows, act)
    if outputs[2] is not None and act is not None:
        _multiply_rows(rows, outputs, 2, dy_rows, act)
    del act, dy_rows
    if any(output is not None for output in (outputs[1], *outputs[6:8])):
        x_rows = rows.of_tokens(call.x)
        rows.fill_lora("gate_up", *outputs[6:8], dpre, x_rows)
        if outputs[1] is not None:
            _multiply_rows(rows, outputs, 1, dpre, x_rows)
    _sum_rows(rows, outputs[4], dpre, dpre.new_ones(len(dpre)))
    if dx is not None:
        rows.combine(rows.project_back("gate_up", dpre), None, dx)
    return tuple(outputs)


def _multiply_rows(rows: _Rows, outputs: list[Tensor | None], i: int, a: Tensor, b: Tensor) -> None:
    """Set outputs[i] to each expert's a.T @ b."""
    transposed = is_transposed(outputs[i])
    # The product allocates its result, in the place of this one.
    outputs[i] = None
    left, right = (b, a) if transposed else (a, b)
    product = product_over_rows(left, right, rows.ends)
    outputs[i] = product.mT if transposed else product


def _sum_rows(rows: _Rows, output: Tensor | None, values: Tensor, weights: Tensor) -> None:
    """Fill output, if it is wanted, with each expert's sum of weighted rows, one column of a
    product."""
    if output is not None:
        columns = weights.unsqueeze(1).expand(-1, SUMS).contiguous()
        output.copy_(product_over_rows(columns, values, rows.ends)[:, 0])
