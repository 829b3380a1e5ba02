"""The experts of transformers' mixture models, by `moe_experts`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..ops.activations.clamped_swiglu import clamped_swiglu
from ..ops.activations.geglu import geglu
from ..ops.activations.relu_squared import relu_squared
from ..ops.activations.swiglu import swiglu
from ..ops.experts.moe_experts import moe_experts
from .recognise import KINDS, LayerKind, identity_of, numbers, options_of


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts as a function that transformers' `ALL_EXPERTS_FUNCTIONS` registers.

    `module` is one that `use_experts_implementation` decorates. Its activation is recognised from
    its `_apply_gate` or, without a gate, its `act_fn`.

    Args:
        module: the experts.
        hidden_states: (T, D).
        top_k_index: (T, K), ids of experts.
        top_k_weights: (T, K).

    Returns:
        (T, D), of hidden_states's dtype.

    Raises:
        ValueError: the activation is none of `moe_experts`'s, or a norm follows the experts.
    """
    options = _options_of(module)
    if options is None or module.has_post_expert_norm:
        reason = "activation" if options is None else "norm after each expert"
        name = type(module).__name__
        raise ValueError(f"experts_forward: moe_experts has no {reason} as that of {name}")
    first = "gate_up_proj" if module.has_gate else "up_proj"
    gate_up, down = getattr(module, first), module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    biases = (
        (getattr(module, f"{first}_bias"), module.down_proj_bias)
        if module.has_bias
        else (None, None)
    )
    y = moe_experts(
        hidden_states, gate_up, down, top_k_index, top_k_weights, *biases,
        **_clamps(module, **dict(options)),
    )  # fmt: skip
    return y.to(hidden_states.dtype)


def run_experts(experts: Any, rows: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """Compute experts by `moe_experts`, or by their own forward where that is something else."""
    if (
        hasattr(experts, "is_transposed") and not experts.has_post_expert_norm
        and _options_of(experts) is not None
    ):  # fmt: skip
        return experts_forward(experts, rows, index, scores)
    y: Tensor = experts(rows, index, scores)
    return y


def _options_of(module: Any) -> Any:
    return options_of("experts", module, identity_of(getattr(module, "act_fn", None)))


def _clamps(module: Any, activation: str, **options: Any) -> dict[str, Any]:
    """Return the options of a call, with the numbers of the module's clamped activation."""
    options["activation"] = activation
    if activation == "clamped_swiglu":
        # A module without them has another activation, which the comparison finds.
        options["alpha"] = getattr(module, "alpha", 1.0)
        options["limit"] = getattr(module, "limit", math.inf)
    return options


def _activated(module: Any, h: Tensor, **options: Any) -> Tensor:
    options = _clamps(module, **options)
    activation, interleaved = options.pop("activation"), options.pop("interleaved")
    if activation == "clamped_swiglu":
        return clamped_swiglu(h, None, interleaved=interleaved, **options)
    if activation == "relu_squared":
        return relu_squared(h)
    if interleaved:
        h = torch.cat((h[..., ::2], h[..., 1::2]), -1)
    if activation == "silu":
        return swiglu(h)
    return geglu(h, None, "none" if activation == "gelu" else "tanh")


def _own_activation(module: Any, h: Tensor) -> Any:
    return module._apply_gate(h) if module.has_gate else module.act_fn(h)


def _candidates() -> list[tuple[tuple[str, Any], ...]]:
    gated = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
    pairs = [(activation, interleaved) for activation in gated for interleaved in (False, True)]
    return [
        (("activation", activation), ("interleaved", interleaved))
        for activation, interleaved in (*pairs, ("relu_squared", False))
    ]


def _example(module: Any, activation: Any) -> Any:
    # Beyond the limits of clamps too.
    return {}, [(20 * numbers(3, 16),)]


KINDS["experts"] = LayerKind(_activated, _candidates(), _example, _own_activation)
