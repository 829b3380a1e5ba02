"""The losses of the routers of a mixture of experts, over all of its layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_1
from ..tensors import widened

# The number of layers that one call of `router_losses_forward` takes.
LAYERS = 8


@library.compose
def router_losses(
    gate_logits: list[Tensor], top_k: int, token_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the load-balancing loss and the z-loss of routers, over all layers of a model.

    With p = softmax(x) of the logits of token t in layer l, and w_t = token_weight:

        W = sum_lt w_t
        f_e = sum_lt w_t * (e is one of the top_k largest x_lte) / W
        P_e = sum_lt w_t * p_lte / W
        load_balancing_loss = E * sum_e f_e * P_e
        z_loss = sum_lt w_t * log(sum_e exp(x_lte))**2 / W

    The first is `load_balancing_loss_func` of transformers, whose attention_mask is token_weight.
    They differ for equal logits: here the first of them count as the largest. f_e has no gradient.
    If all weights are 0, the losses are NaN. A token of weight 0 has a gradient of exactly 0,
    whatever its logits are.

    The losses are computed and returned in float32, whatever the dtype of the logits; autocast
    changes nothing. The logits are read once in each direction, and not concatenated; per expert,
    two numbers are stored. Sums are in an order that does not change between runs. float64 runs the
    definition on every device, and so do more than 2048 experts on an NPU.

    This op calls `router_losses_forward` for every eight layers.

    Args:
        gate_logits: a tensor (..., E) for each layer, all of one shape and dtype, floating point,
            any strides.
        top_k: the number of experts of a token, from 1 to E.
        token_weight: (...), of any dtype, without a gradient; None for ones.

    Returns:
        load_balancing_loss: (), float32, or float64 if the logits are.
        z_loss: the same.

    Raises:
        TypeError: the logits are not floating point, or have different dtypes.
        ValueError: there are no layers, the logits have different shapes, token_weight does not
            have the shape of the tokens or requires a gradient, the devices differ, or top_k is
            below 1 or above E.

    Source: Fedus et al., "Switch Transformers", 2021; Zoph et al., "ST-MoE", 2022 (z-loss).

    Example:
        >>> liger_ops.router_losses([torch.eye(2), torch.eye(2)], 1)
        (tensor(1.), tensor(1.7247))
    """
    if not gate_logits:
        raise ValueError("router_losses: gate_logits must have at least one tensor, got none")
    if token_weight is not None and not token_weight.is_floating_point():
        token_weight = token_weight.float()
    parts = []
    for first in range(0, len(gate_logits), LAYERS):
        layers: list[Any] = gate_logits[first : first + LAYERS]
        arguments = [*layers, *[None] * (LAYERS - len(layers)), token_weight, top_k]
        parts.append(router_losses_forward(*arguments))
    probabilities, z, tokens = (torch.stack(sums).sum(0) for sums in zip(*parts, strict=True))
    *rows, experts = gate_logits[0].shape
    weight = math.prod(rows) if token_weight is None else token_weight.to(z.dtype).sum()
    weight = weight * len(gate_logits)
    return experts * (tokens / weight * (probabilities / weight)).sum(), z / weight


@library.define(
    tags=torch.Tag.needs_fixed_stride_order,
    returns="probabilities z tokens",
    axes=f"x0=* E, {', '.join(f'x{i}=* E: x0' for i in range(1, LAYERS))}, token_weight=*"
    " -> probabilities=E, z=, tokens=E",
    dtype="float32+x0",
    options={"top_k": AT_LEAST_1},
)
def router_losses_forward(
    x0: Tensor, x1: Tensor | None = None, x2: Tensor | None = None, x3: Tensor | None = None,
    x4: Tensor | None = None, x5: Tensor | None = None, x6: Tensor | None = None,
    x7: Tensor | None = None, token_weight: Tensor | None = None, top_k: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the sums over tokens from which `router_losses` follows, of up to eight layers.

    Args:
        x0, x1, x2, x3, x4, x5, x6, x7: (..., E); the logits of the layers, of one shape and dtype,
            floating point, any strides. None if there are fewer layers.
        token_weight: (...), floating point, without a gradient; None for ones.
        top_k: as for `router_losses`.

    Returns:
        probabilities: (E,); the sum of the weighted probabilities of each expert.
        z: (); the sum of the weighted squares of the logarithms of the sums of exponentials.
        tokens: (E,); the sum of the weights of each expert's tokens; not differentiable.

        All are float32, or float64 if the logits are.

    Raises:
        TypeError, ValueError: as `router_losses`.

    Example:
        >>> liger_ops.router_losses_forward(torch.eye(2), top_k=1)[2]
        tensor([1., 1.])
    """
    layers = [
        _sums(x, token_weight, top_k) for x in (x0, x1, x2, x3, x4, x5, x6, x7) if x is not None
    ]
    probabilities, z, tokens = (torch.stack(sums).sum(0) for sums in zip(*layers, strict=True))
    return probabilities, z, tokens


def _sums(x: Tensor, token_weight: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of one layer."""
    x = widened(x).reshape(-1, x.shape[-1])
    # A stable sort, and not topk: it puts the first of equal logits first.
    chosen = torch.sort(x.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    selected = torch.zeros_like(x).scatter(-1, chosen, 1.0)
    if token_weight is None:
        return x.softmax(-1).sum(0), x.logsumexp(-1).square().sum(), selected.sum(0)
    weight = token_weight.reshape(-1, 1).to(x.dtype)
    # The logits of tokens that do not count may be NaN, which times 0 is NaN.
    x = torch.where(weight != 0, x, 0.0)
    z = (x.logsumexp(-1, keepdim=True).square() * weight).sum()
    return (x.softmax(-1) * weight).sum(0), z, (selected * weight).sum(0)


_LAYERS = [f"x{i}" for i in range(LAYERS)]
router_losses_backward = library.derive_backward(
    "router_losses_forward",
    f"dprobabilities? dz? {' '.join(_LAYERS)} token_weight output_mask -> "
    + " ".join(f"d{name}" for name in _LAYERS),
)
