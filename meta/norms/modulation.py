"""modulated_rms_norm and modulated_layer_norm: checks and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.norms import modulated_layer_norm as layer
from ...ops.norms import modulated_rms_norm as rms
from .. import checks
from .rms_norm import check as check_rms_norm


@library.fake("modulated_rms_norm")
def modulated_rms_norm(call: Any) -> Tensor:
    check_rms_norm(call, "x")
    _check_modulation(call)
    checks.choice(call, "casting_mode", rms.CASTING_MODES)
    return checks.like(call.x)


@library.fake("modulated_rms_norm_backward")
def modulated_rms_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    check_rms_norm(call, "x")
    _check_modulation(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "scale", "shift", "weight")


@library.fake("modulated_layer_norm")
def modulated_layer_norm(call: Any) -> Tensor:
    checks.norm(call, "x", "weight", "bias")
    _check_modulation(call)
    checks.choice(call, "casting_mode", layer.CASTING_MODES)
    return checks.like(call.x)


@library.fake("modulated_layer_norm_backward")
def modulated_layer_norm_backward(call: Any) -> tuple[Tensor | None, ...]:
    checks.norm(call, "x", "weight", "bias")
    _check_modulation(call)
    checks.same_form(call, "x", "dy")
    return checks.gradients(call, "x", "scale", "shift", "weight", "bias")


def _check_modulation(call: Any) -> None:
    checks.floating(call, "scale", "shift")
    checks.same_device(call, "x", "scale", "shift")
    if not _has_rows_of_samples(call.x, call.scale):
        raise ValueError(
            f"{checks.op(call)}: scale must be (N,), or x's first dimensions and N, for x of shape"
            f" {tuple(call.x.shape)}, got {tuple(call.scale.shape)}"
        )
    checks.shape(call, "shift", call.scale.shape, "scale")


def _has_rows_of_samples(x: Tensor, scale: Tensor) -> bool:
    """Whether each row of scale is for as many neighbouring rows of x."""
    if not 1 <= scale.dim() <= x.dim() or scale.shape[-1] != x.shape[-1]:
        return False
    leading = list(scale.shape[:-1])
    while leading and leading[-1] == 1:
        leading.pop()
    if leading == list(x.shape[: len(leading)]):
        return True
    # A batch that was flattened to rows.
    return x.dim() == 2 and leading[0] > 0 and x.shape[0] % leading[0] == 0
