"""linear_cross_entropy: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..ops.head import forward_dweight_dtype, forward_gradient_dtype
from . import checks
from .cross_entropy import check_gradients, check_options, check_target, check_token_weight, losses


@library.fake("linear_cross_entropy_forward")
def linear_cross_entropy_forward(call: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, mask = call.x, call.weight, call.bias, call.gradient_mask
    _check(call, "gradient_mask")
    if call.reduction == "none" and any(mask):
        raise ValueError(
            f"{checks.op(call)}: gradient_mask must be all False for the reduction 'none', whose"
            f" gradient the backward computes, got {list(mask)}"
        )
    dtype = forward_gradient_dtype(weight)
    dweight_dtype = forward_dweight_dtype(weight, call.accum_dtype)
    return (
        *losses(call, x),
        checks.like(x, dtype) if mask[0] else None,
        checks.like(weight, dweight_dtype) if mask[1] else None,
        checks.like(bias, dtype) if mask[2] else None,
    )


@library.fake("linear_cross_entropy_backward")
def linear_cross_entropy_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "output_mask")
    check_gradients(call, "x")
    computed = ("dx", "dweight", "dbias")
    checks.floating(call, *computed)
    checks.same_device(call, "x", *computed)
    checks.shape(call, "dx", call.x.shape, "x")
    checks.shape(call, "dweight", call.weight.shape, "weight")
    checks.shape(call, "dbias", call.weight.shape[:1], "weight's rows")
    return checks.gradients(call, "x", "weight", "bias")


def _check(call: Any, mask: str) -> None:
    checks.floating(call, "class_weight")
    checks.same_device(call, "x", "class_weight")
    check_linear(call, mask)
    check_token_weight(call, "x")
    checks.shape(call, "class_weight", call.weight.shape[:1], "weight's rows")
    check_options(call, "x")


def check_linear(call: Any, mask: str = "") -> None:
    """Check the arguments of a linear layer whose logits are chunked, and target. `mask` names the
    argument that says whether the gradients of x, weight and bias are wanted."""
    check_layer(call)
    check_target(call, "x")
    check_chunks(call, call.weight)
    if mask and getattr(call, mask)[2] and call.bias is None:
        raise ValueError(
            f"{checks.op(call)}: {mask}[2] must be False without a bias, got"
            f" {list(getattr(call, mask))}"
        )


def check_layer(call: Any, prefix: str = "") -> None:
    """Check x, weight and bias of a linear layer, whose names start with `prefix`."""
    x_name, weight_name, bias_name = (f"{prefix}{name}" for name in ("x", "weight", "bias"))
    op, x, weight = checks.op(call), getattr(call, x_name), getattr(call, weight_name)
    checks.floating(call, x_name, weight_name, bias_name)
    checks.at_least_dims(call, x_name, 1, "(..., D)")
    checks.same_device(call, x_name, weight_name, bias_name)
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != D:
        raise ValueError(
            f"{op}: {weight_name} must be (V, D) with D of {x_name}, {D}, and at least one class,"
            f" got {tuple(weight.shape)}"
        )
    for name, tensor in checks.given(call, (weight_name, bias_name)):
        if tensor.dtype is not x.dtype:
            raise TypeError(
                f"{op}: {name} must have {x_name}'s dtype, {x.dtype}, got {tensor.dtype}"
            )
    checks.shape(call, bias_name, weight.shape[:1], f"{weight_name}'s rows")


def check_chunks(call: Any, weight: Tensor) -> None:
    op, accum_dtype = checks.op(call), call.accum_dtype
    accepted = {weight.dtype, torch.float64 if weight.dtype is torch.float64 else torch.float32}
    if accum_dtype is not None and accum_dtype not in accepted:
        names = " or ".join(sorted(map(str, accepted)))
        raise ValueError(f"{op}: accum_dtype must be {names} or None, got {accum_dtype}")
    if call.chunk_bytes is not None and call.chunk_bytes < 1:
        raise ValueError(f"{op}: chunk_bytes must be above 0 or None, got {call.chunk_bytes}")
