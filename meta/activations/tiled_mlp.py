"""tiled_mlp: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.activations.tiled_mlp import ACTIVATIONS
from .. import checks

WEIGHTS = ("gate_weight", "up_weight", "down_weight")
BIASES = ("gate_bias", "up_bias", "down_bias")


@library.fake("tiled_mlp_forward")
def tiled_mlp_forward(call: Any) -> Tensor:
    _check(call)
    shape = (*call.x.shape[:-1], call.down_weight.shape[0])
    return call.x.new_empty(shape, requires_grad=False)


@library.fake("tiled_mlp_backward")
def tiled_mlp_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    shape = (*call.x.shape[:-1], call.down_weight.shape[0])
    checks.floating(call, "dy")
    checks.same_device(call, "x", "dy")
    checks.shape(call, "dy", shape, "the result, x's and a column for each row of down_weight")
    _same_dtype(call, "dy")
    return checks.gradients(call, "x", *WEIGHTS, *BIASES)


def _check(call: Any) -> None:
    checks.floating(call, "x", *WEIGHTS, *BIASES)
    checks.at_least_dims(call, "x", 1, "(..., D)")
    checks.same_device(call, "x", *WEIGHTS, *BIASES)
    for name in ("gate_weight", "down_weight"):
        weight = getattr(call, name)
        if weight.dim() != 2:
            form = "(I, D)" if name == "gate_weight" else "(O, I)"
            raise ValueError(
                f"{checks.op(call)}: {name} must be {form}, got shape {tuple(weight.shape)}"
            )
    gate, down = call.gate_weight, call.down_weight
    checks.shape(call, "gate_weight", (gate.shape[0], call.x.shape[-1]), "I rows as wide as x")
    checks.shape(call, "up_weight", gate.shape, "gate_weight")
    checks.shape(call, "down_weight", (down.shape[0], gate.shape[0]), "O rows of gate_weight's I")
    for name in BIASES[:2]:
        checks.shape(call, name, gate.shape[:1], "gate_weight's rows")
    checks.shape(call, "down_bias", down.shape[:1], "down_weight's rows")
    _same_dtype(call, *WEIGHTS, *BIASES)
    checks.choice(call, "activation", tuple(ACTIVATIONS))
    if call.tile_rows is not None and call.tile_rows < 1:
        raise ValueError(f"{checks.op(call)}: tile_rows must be at least 1, got {call.tile_rows}")


def _same_dtype(call: Any, *names: str) -> None:
    for name, tensor in checks.given(call, names):
        if tensor.dtype != call.x.dtype:
            raise ValueError(
                f"{checks.op(call)}: {name} must have x's dtype, {call.x.dtype}, got {tensor.dtype}"
            )
