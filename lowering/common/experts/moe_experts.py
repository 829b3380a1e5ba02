"""Host code of moe_experts, for both devices."""

from __future__ import annotations

from typing import Any

from ....ops.experts.rows import ACTIVATIONS


def activation_of(call: Any) -> tuple[str, tuple[float, float, float]]:
    """Return the name of a call's activation in kernels, and its three scalars."""
    name, options = ACTIVATIONS[call.activation]
    if name == "geglu":
        name, options = f"geglu_{options[0]}", ()
    if name == "clamped_swiglu":
        options = (call.alpha, call.limit, call.up_offset)
    return name, (*options, 0.0, 0.0, 0.0)[:3]
