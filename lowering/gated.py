"""The gated activations, by a device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import library

# The activation as kernels name it, its scalars, and whether a packed gate is interleaved.
OPTIONS: dict[str, Callable[[Any], tuple[str, tuple[float, float, float], bool]]] = {
    "swiglu": lambda call: ("swiglu", (call.gate_multiplier, call.down_multiplier, 0.0), False),
    "clamped_swiglu": lambda call: (
        "clamped_swiglu",
        (call.alpha, call.limit, call.up_offset),
        call.interleaved,
    ),
    "geglu": lambda call: (f"geglu_{call.approximate}", (0.0, 0.0, 0.0), False),
}


def register(device: str, forward: Callable[..., None], backward: Callable[..., None]) -> None:
    """Register the launches of a device's kernels: of gate, up and y, and of dy, gate, up, dgate
    and dup, followed by OPTIONS and the plan."""
    for name in OPTIONS:
        _register(name, device, forward, backward)


def _register(
    name: str, device: str, forward: Callable[..., None], backward: Callable[..., None]
) -> None:
    @library.kernel(name, device, module=forward.__module__)
    def launch_forward(call, y, plan):
        forward(call.gate, call.up, y, *OPTIONS[name](call), plan)

    @library.kernel(f"{name}_backward", device, module=backward.__module__)
    def launch_backward(call, dgate, dup, plan):
        backward(call.dy, call.gate, call.up, dgate, dup, *OPTIONS[name](call), plan)
