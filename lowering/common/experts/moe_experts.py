"""Host code of moe_experts, for both devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.experts.moe_experts import ACTIVATIONS


def activation_of(call: Any) -> tuple[str, tuple[float, float, float]]:
    """The name of the activation in kernels, and its scalars."""
    name, options = ACTIVATIONS[call.activation]
    if name == "geglu":
        name, options = f"geglu_{options[0]}", ()
    if name == "clamped_swiglu":
        options = (call.alpha, call.limit, call.up_offset)
    return name, (*options, 0.0, 0.0, 0.0)[:3]


def add_biases(call: Any, dy: Tensor, dweights: Tensor) -> None:
    """Add the part of the gradient of the router's weights that comes from down_bias."""
    if call.down_bias is None:
        return
    bias, ids = call.down_bias.t(), call.top_k_index.long()
    if dy.is_cuda and dy.dtype is torch.bfloat16:
        products = torch.ops.aten.mm.dtype(dy, bias, torch.float32)
    else:
        products = torch.mm(dy.float(), bias.float())
    exists = (ids >= 0) & (ids < bias.shape[1])
    of_bias = products.gather(1, ids.where(exists, 0))
    dweights += of_bias.where(exists, 0)
