"""The routed MLPs of a mixture-of-experts layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..heads.head import cast_for_products
from .rows import ACTIVATIONS, GRADIENTS, ExpertRows, sort

AXES = (
    "x=T D, gate_up=E F D: x, down=E D I: x, top_k_index=T K: int, top_k_weights=T K,"
    "gate_up_bias=E F: x, down_bias=E D: x, gate_up_lora_a=E R D: x, gate_up_lora_b=E F R: x,"
    "down_lora_a=E S I: x, down_lora_b=E D S: x"
    "-> y=T D, order=T*K: int32, offsets=E+1: int32, pre_activation=T*K F"
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
    """Apply the experts of a mixture-of-experts layer, and sum those that a router chose per token.

        h[t, k] = x[t] @ gate_up[e].T + gate_up_bias[e]                   with e = top_k_index[t, k]
        y[t] = sum over k of top_k_weights[t, k] * (a(h[t, k]) @ down[e].T + down_bias[e])

    where a(h) is activation(gate) * up of the gate and up that h holds, as `swiglu`, `geglu` and
    `clamped_swiglu` compute it or, without a gate, `relu_squared`.

    An id below 0 or from E on is a sentinel: expert parallelism gives one to the experts of other
    devices, and one may mark a dropped token. A sentinel adds nothing to y, and its weight has the
    gradient 0. An expert may have no token or all of them, and there may be no tokens.

    Products have operands of x's dtype and sum in float32; h, a(h) and an expert's result are
    rounded to x's dtype, as by model code. The sum over k is in float32, in k's order, and rounded
    once. Each gradient is summed in float32 in an order that does not change between runs.

    With gate_up_lora_a and gate_up_lora_b, the weight of the first product is

        gate_up[e] + gate_up_lora_scale * gate_up_lora_b[e] @ gate_up_lora_a[e]

    which is never formed: the token's product with gate_up_lora_a[e], rounded to x's dtype, is
    multiplied by gate_up_lora_b[e]. The same holds for down. The gradient of a frozen weight is not
    computed.

    Weights are read by their strides, without a copy: pass a transposed parameter, (E, D, F), as
    its view `gate_up.mT`. The gradient is dense in the order of the view's strides, so that the
    parameter's gradient is contiguous.

    The forward sorts the ids by expert, stably and on the device; nothing waits for the device, and
    every size is known from the arguments' shapes. For the backward it keeps x, h in the order of
    the experts, and a number of 4 bytes for each of the T * K rows. With `recompute` it does not
    keep h, and the backward computes that product again. a(h) and the experts' results are never
    kept. Nothing is kept if no gradient is needed.

    Kernels run on NVIDIA GPUs and NPUs. An NPU's products are torch_npu's npu_grouped_matmul, which
    takes at most 1024 experts, and rows of less than 65536 elements. CPUs and float64 run the
    definition, a loop over the experts that reads their numbers of tokens. Under autocast, all
    inputs except top_k_weights are cast as those of a linear layer are.

    This op calls `moe_experts_forward`.

    Args:
        x: (T, D), floating point.
        gate_up: (E, F, D), of x's dtype, any strides. F is 2I: I rows of gate and then I of up, or
            pairs of both if interleaved. For "relu_squared" F is I.
        down: (E, D, I), of x's dtype, any strides.
        top_k_index: (T, K), int32 or int64: ids of experts.
        top_k_weights: (T, K), floating point.
        gate_up_bias: (E, F), of x's dtype, or None.
        down_bias: (E, D), of x's dtype, or None.
        activation: "silu"; "gelu", with erf; "gelu_tanh", its approximation; "clamped_swiglu";
            or "relu_squared", without a gate.
        alpha, limit, up_offset: the options of "clamped_swiglu", as in `clamped_swiglu`.
        interleaved: whether the rows of gate_up are pairs (gate, up, gate, up), as in GPT-OSS.
        recompute: whether the backward computes h again instead of keeping it.
        gate_up_lora_a, gate_up_lora_b: (E, R, D) and (E, F, R), of x's dtype, any strides: a LoRA
            that is added to gate_up. Both, or neither.
        down_lora_a, down_lora_b: (E, S, I) and (E, D, S), of x's dtype, any strides: a LoRA that is
            added to down. Both, or neither.
        gate_up_lora_scale, down_lora_scale: the factors of the LoRAs' products.

    Returns:
        (T, D), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point, or a weight, bias or LoRA does not have x's
            dtype; or top_k_index is not int32 or int64.
        ValueError: the shapes do not fit together, one tensor of a LoRA is given without the other,
            the devices differ, activation is unknown, limit is negative, or interleaved is True
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
    tensors = [t for t in (x, gate_up, down, *optional) if t is not None]
    cast = iter(cast_for_products(*tensors))
    x, gate_up, down = (next(cast) for _ in range(3))
    gate_up_bias, down_bias, *lora = (t if t is None else next(cast) for t in optional)
    gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b = lora
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, top_k_weights))
    return moe_experts_forward(
        x, gate_up, down, top_k_index, top_k_weights, gate_up_bias, down_bias,
        activation, alpha, limit, up_offset, interleaved, needed and not recompute,
        gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b,
        gate_up_lora_scale, down_lora_scale,
    )[0]  # fmt: skip


@library.forward(
    "x gate_up down top_k_index top_k_weights gate_up_bias down_bias activation alpha limit"
    " up_offset interleaved -recompute return_pre_activation ...",
    tags=torch.Tag.needs_exact_strides, returns="y order offsets pre_activation", axes=AXES,
    options={"activation": tuple(ACTIVATIONS), "limit": AT_LEAST_0},
)  # fmt: skip
def moe_experts_forward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute `moe_experts`, and the order of the rows and h, which its backward needs.

    Autocast changes nothing here.

    Returns:
        y: the result of `moe_experts`, the only one with a gradient.
        order: (T * K,), int32: the positions t * K + k in top_k_index, sorted stably by expert,
            with the positions of sentinels last.
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
    return ExpertRows(call, *sort(call.top_k_index, call.down.shape[0])).results()


@library.backward(
    "moe_experts_forward",
    "dy x gate_up down top_k_index top_k_weights gate_up_bias down_bias gate_up_lora_a"
    " gate_up_lora_b down_lora_a down_lora_b ... order offsets pre_activation? output_mask"
    f" -> {GRADIENTS}",
    returns=GRADIENTS,
)
def moe_experts_backward(call: Any) -> tuple[Tensor | None, ...]:
    """Compute the gradient of `moe_experts`. For expert e, with its rows of dy, x, h and weights w:

        da = dy @ down[e], dh = (w * da) * a'(h), dw = sum of da * a(h), and of dy * down_bias[e]
        ddown[e] = dy.T @ (w * a(h)), dgate_up[e] = dh.T @ x, and dx is the sum of dh @ gate_up[e]

    so that the experts' results are not needed. It is not derived by autograd, which would take two
    more products, and compute all of them in float32.
    """
    return ExpertRows(call, call.order, call.offsets).gradients()


library.keep_dtypes_under_autocast("moe_experts_forward")
library.keep_dtypes_under_autocast("moe_experts_backward")
