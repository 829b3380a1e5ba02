"""Register the gated activations with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .... import library
from .elementwise import as_rows, parts


class GatedActivation(NamedTuple):
    """An activation's name in kernels, its scalars, and whether a packed gate is interleaved."""

    name: str
    scalars: tuple[float, float, float]
    interleaved: bool = False


ACTIVATIONS: dict[str, Callable[[Any], GatedActivation]] = {
    "swiglu": lambda call: GatedActivation(
        "swiglu", (call.gate_multiplier, call.down_multiplier, 0.0)
    ),
    "clamped_swiglu": lambda call: GatedActivation(
        "clamped_swiglu", (call.alpha, call.limit, call.up_offset), call.interleaved
    ),
    "geglu": lambda call: GatedActivation(f"geglu_{call.approximate}", (0.0, 0.0, 0.0)),
}


def register(
    device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register a device's launch(activation, y, gate, up, plan) and launch_backward(activation, dy,
    gate, up, dgate, dup, plan), which take tensors of (M, N). `up` and `dup` are None where gate
    and up are interleaved in one tensor."""
    for name, activation_of in ACTIVATIONS.items():

        @library.kernel(name, device, module=launch.__module__)
        def forward(call, y, plan, activation_of=activation_of):
            activation = activation_of(call)
            gate, up = parts(call.gate, call.up, activation.interleaved)
            launch(activation, *as_rows(y, gate, up), plan)

        @library.kernel(f"{name}_backward", device, module=launch.__module__)
        def backward(call, dgate, dup, plan, activation_of=activation_of):
            activation = activation_of(call)
            gate, up = parts(call.gate, call.up, activation.interleaved)
            if call.up is None:
                dgate, dup = parts(dgate, None, activation.interleaved)
            launch_backward(activation, *as_rows(call.dy, gate, up, dgate, dup), plan=plan)
