"""The routed MLPs of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..heads.head import cast_for_products
from ..precision import widened
from ..strides import dense
from .route import Route

# Activation -> the op that computes it, and that op's options. Those of clamped_swiglu are given.
ACTIVATIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "silu": ("swiglu", (1.0, 1.0)),
    "gelu": ("geglu", ("none",)),
    "gelu_tanh": ("geglu", ("tanh",)),
    "clamped_swiglu": ("clamped_swiglu", ()),
    "relu_squared": ("relu_squared", ()),
}
AXES = (
    "x=T D, gate_up=E F D: x, down=E D I: x, top_k_index=T K: int, top_k_weights=T K,"
    "gate_up_bias=E F: x, down_bias=E D: x, gate_up_lora_a=E R D: x, gate_up_lora_b=E F R: x,"
    "down_lora_a=E S I: x, down_lora_b=E D S: x"
    "-> y=T D, order=T*K: int32, offsets=E+1: int32, pre_activation=T*K F"
)

GRADIENTS = (
    "dx dgate_up ddown dtop_k_weights dgate_up_bias ddown_bias dgate_up_lora_a dgate_up_lora_b"
    " ddown_lora_a ddown_lora_b"
)


@library.compose
def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
    interleaved: bool = False, recompute: bool = False,
    gate_up_lora_a: Tensor | None = None, gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None, down_lora_b: Tensor | None = None,
    gate_up_lora_scale: float = 1.0, down_lora_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The experts of a mixture-of-experts layer: each token's sum of the MLPs that a router chose.

        h[t, k] = x[t] @ gate_up[e].T + gate_up_bias[e]                   with e = top_k_index[t, k]
        y[t] = sum over k of top_k_weights[t, k] * (a(h[t, k]) @ down[e].T + down_bias[e])

    where a is activation(gate) * up of the gate and up that h holds, as `swiglu`, `geglu` and
    `clamped_swiglu` compute it or, without a gate, `relu_squared`.

    An id below 0 or from E on is a sentinel, such as expert parallelism gives to the experts of
    other devices, or marks a dropped token: it adds nothing, and its weight has the gradient 0. An
    expert may have no token or all, and there may be no token.

    Products have operands of x's dtype and sum in float32; h, a(h) and an expert's result are
    rounded to x's dtype, as by model code. The sum over k is in float32, in k's order, and rounded
    once. Each gradient is summed in float32 in an order that does not change between runs.

    With gate_up_lora_a and gate_up_lora_b, the first product is of

        gate_up[e] + gate_up_lora_scale * gate_up_lora_b[e] @ gate_up_lora_a[e]

    which is never formed: the token's product with gate_up_lora_a[e], rounded to x's dtype, is
    multiplied by gate_up_lora_b[e]. So it is for down. No gradient of a frozen weight is computed.

    Weights are read by their strides, without a copy: pass a transposed parameter, (E, D, F), as
    its view `gate_up.mT`. The gradient is dense in the order of the view's strides, so that the
    parameter's is contiguous.

    The forward sorts the ids by expert, stably and on the device; nothing waits for the device, and
    every size is known from the arguments' shapes. The backward keeps x and h, in the order of the
    experts, and for each of the T * K rows a number of 4 bytes. With `recompute` it keeps no h, and
    computes its product again. a(h) and the experts' results are never kept. Nothing is kept if no
    gradient is needed.

    Kernels run on NVIDIA GPUs and NPUs. An NPU's products are torch_npu's npu_grouped_matmul, which
    takes at most 1024 experts, and rows of less than 65536 elements. CPUs and float64 run the
    definition, a loop over the experts that reads their numbers of tokens. Under autocast, inputs
    but top_k_weights are cast as those of a linear layer are.

    This op calls `moe_experts_forward`.

    Args:
        x: (T, D), floating point.
        gate_up: (E, F, D), of x's dtype, any strides. F is 2I, a gate's I rows and then up's, or
            pairs of both if interleaved; I for "relu_squared".
        down: (E, D, I), of x's dtype, any strides.
        top_k_index: (T, K), int32 or int64: ids of experts.
        top_k_weights: (T, K), floating point.
        gate_up_bias: (E, F), of x's dtype, or None.
        down_bias: (E, D), of x's dtype, or None.
        activation: "silu"; "gelu", with erf; "gelu_tanh", its approximation; "clamped_swiglu";
            or "relu_squared", without a gate.
        alpha, limit, up_offset: the options of "clamped_swiglu", as of `clamped_swiglu`.
        interleaved: whether the rows of gate_up are pairs (gate, up, gate, up), as GPT-OSS's.
        recompute: whether the backward computes h again instead of keeping it.
        gate_up_lora_a, gate_up_lora_b: (E, R, D) and (E, F, R), of x's dtype, any strides: a LoRA
            that is added to gate_up. Both, or neither.
        down_lora_a, down_lora_b: (E, S, I) and (E, D, S), of x's dtype, any strides: a LoRA that is
            added to down. Both, or neither.
        gate_up_lora_scale, down_lora_scale: the factors of the LoRAs' products.

    Returns:
        (T, D), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point, or not of x's dtype, or top_k_index is not int32
            or int64.
        ValueError: a shape, a device, activation or limit is not as above, or interleaved is given
            with "relu_squared".

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
        Mixture-of-Experts Layer", 2017; Guo et al., "SonicMoE", 2025 (what is saved).

    Example:
        >>> x, gate_up, down = torch.ones(2, 4), torch.ones(3, 2, 4), torch.ones(3, 4, 1)
        >>> index, weights = torch.tensor([[0, 2], [1, 3]]), torch.full((2, 2), 0.5)
        >>> liger_ops.moe_experts(x, gate_up, down, index, weights)
        tensor([[15.7122, 15.7122, 15.7122, 15.7122],
                [ 7.8561,  7.8561,  7.8561,  7.8561]])
    """
    optional = (
        gate_up_bias, down_bias, gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b,
    )  # fmt: skip
    given = [t for t in (x, gate_up, down, *optional) if t is not None]
    cast = iter(cast_for_products(*given))
    x, gate_up, down = (next(cast) for _ in range(3))
    gate_up_bias, down_bias, *lora = (t if t is None else next(cast) for t in optional)
    gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b = lora
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, top_k_weights))
    return moe_experts_forward(
        x, gate_up, down, top_k_index, top_k_weights, gate_up_bias, down_bias,
        activation, alpha, limit, up_offset, interleaved, needed and not recompute,
        gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b,
        gate_up_lora_scale, down_lora_scale,
    )[0]  # fmt: skip


@library.define(
    strides=torch.Tag.needs_exact_strides, returns="y order offsets pre_activation", axes=AXES,
    options={"activation": tuple(ACTIVATIONS), "limit": AT_LEAST_0},
)  # fmt: skip
def moe_experts_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
    interleaved: bool = False, return_pre_activation: bool = True,
    gate_up_lora_a: Tensor | None = None, gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None, down_lora_b: Tensor | None = None,
    gate_up_lora_scale: float = 1.0, down_lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`moe_experts`, in the dtypes of its inputs under autocast too, with what its backward needs.

    Args:
        x, gate_up, down, top_k_index, top_k_weights, gate_up_bias, down_bias, activation, alpha,
            limit, up_offset, interleaved, gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b,
            gate_up_lora_scale, down_lora_scale: as `moe_experts`.
        return_pre_activation: whether the last result is wanted.

    Returns:
        y: the result of `moe_experts`, the only one with a gradient.
        order: (T * K,), int32: the places t * K + k in top_k_index, sorted stably by expert, with
            those of sentinels last.
        offsets: (E + 1,), int32: expert e has order[offsets[e] : offsets[e + 1]].
        pre_activation: (T * K, F), of x's dtype: h in that order, or None. The rows of sentinels
            have any value.

    Raises:
        TypeError, ValueError: as `moe_experts`.

    Example:
        >>> x, gate_up, down = torch.ones(2, 4), torch.ones(3, 2, 4), torch.ones(3, 4, 1)
        >>> index, weights = torch.tensor([[0, 2], [1, 3]]), torch.full((2, 2), 0.5)
        >>> liger_ops.moe_experts_forward(x, gate_up, down, index, weights)[1:3]
        (tensor([0, 2, 1, 3], dtype=torch.int32), tensor([0, 1, 2, 3], dtype=torch.int32))
    """
    E, K = gate_up.shape[0], top_k_index.shape[1]
    route = Route.of(top_k_index, E)
    rows = x[route.order // K].split(route.sizes)
    activate = activation_of(activation, alpha, limit, up_offset, interleaved)
    up = (gate_up, gate_up_bias, gate_up_lora_a, gate_up_lora_b, gate_up_lora_scale)
    back = (down, down_bias, down_lora_a, down_lora_b, down_lora_scale)
    hidden, results = [], []
    for e in range(E):
        hidden.append(_product(rows[e], e, *up))
        results.append(_product(activate(hidden[e]), e, *back))
    # The rows of sentinels are zeros.
    hidden.append(x.new_zeros(rows[E].shape[0], gate_up.shape[1]))
    results.append(x.new_zeros(rows[E].shape))
    placed = torch.cat(results)[route.order.argsort()].unflatten(0, top_k_index.shape)
    weights = widened(top_k_weights).where((top_k_index >= 0) & (top_k_index < E), 0)
    y = (widened(placed) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    pre_activation = torch.cat(hidden) if return_pre_activation else None
    return y, route.order.int(), route.offsets.int(), pre_activation


def activation_of(
    activation: str, alpha: float, limit: float, up_offset: float, interleaved: bool
) -> Callable[[Tensor], Tensor]:
    """The activation of h, by the definition of its op."""
    name, options = ACTIVATIONS[activation]
    activate = library.OPS[name].definition
    if activation == "relu_squared":
        return activate
    if activation == "clamped_swiglu":
        options = (alpha, limit, up_offset)

    def gated(h: Tensor) -> Tensor:
        gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
        return activate(gate, up, *options)

    return gated


def _product(
    x: Tensor, e: int, weight: Tensor, bias: Tensor | None,
    lora_a: Tensor | None, lora_b: Tensor | None, lora_scale: float,
) -> Tensor:  # fmt: skip
    """x times an expert's weight. The product of a LoRA adds to the first, which is rounded before,
    and the sum is rounded again."""
    y = F.linear(x, weight[e], None if bias is None else bias[e])
    if lora_a is None or lora_b is None:
        return y
    return torch.addmm(y, lora_scale * F.linear(x, lora_a[e]), lora_b[e].t())


moe_experts_backward = library.derive_backward(
    "moe_experts_forward",
    "dy x gate_up down top_k_index top_k_weights gate_up_bias down_bias gate_up_lora_a"
    " gate_up_lora_b down_lora_a down_lora_b ... order offsets pre_activation? output_mask"
    f" -> {GRADIENTS}",
    returns=GRADIENTS,
    layout=dense,
)
library.keep_dtypes_under_autocast("moe_experts_forward")
library.keep_dtypes_under_autocast("moe_experts_backward")
