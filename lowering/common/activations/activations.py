"""Register the gated activations with a device's kernels, which take tensors as (M, N)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .... import library

# The length of one flat row depends on the batch size. Triton specialises kernels on numbers that
# are multiples of 16: if the width is a multiple, so is the length for every batch size, and one
# kernel is compiled.
FLAT_WIDTH = 16


def as_rows(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """View tensors, equal in shape except for the last dimension, as (M, N) with unit stride in N.

    If all are contiguous and the width is a multiple of FLAT_WIDTH, each becomes one row. Otherwise
    rows may be apart in memory; a tensor is copied only if no such view exists.
    """
    tensors = (first, *others)
    flat = _width(first) % FLAT_WIDTH == 0 and all(
        tensor is None or tensor.is_contiguous() for tensor in tensors
    )
    if flat:
        return [None if tensor is None else tensor.view(1, -1) for tensor in tensors]
    return [None if tensor is None else _rows(tensor) for tensor in tensors]


def row_stride(rows: Tensor | None) -> int:
    """Return the stride over rows; 0 for an absent tensor."""
    return 0 if rows is None else rows.stride(0)


def _width(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, _width(x))
    return flat if flat.stride(1) == 1 else flat.contiguous()


def parts(
    gate: Tensor | None, up: Tensor | None, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Split a packed gate into views of its halves, gate and up, unless it is interleaved."""
    if gate is None or up is not None or interleaved:
        return gate, up
    N = gate.shape[-1] // 2
    return gate[..., :N], gate[..., N:]


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
