"""linear_cross_entropy: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..ops.head import forward_dweight_dtype, forward_gradient_dtype
from . import checks
from .cross_entropy import check_gradients, check_options, check_target, check_token_weight, losses

# The tensors of a head, in the order of masks and gradients.
HEAD = ("x", "weight", "bias", "lora_x", "lora_b")


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
        checks.like(call.lora_x, dtype) if mask[3] else None,
        checks.like(call.lora_b, dweight_dtype) if mask[4] else None,
    )


@library.fake("linear_cross_entropy_backward")
def linear_cross_entropy_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "output_mask")
    check_gradients(call, "x")
    computed = ("dx", "dweight", "dbias", "dlora_x", "dlora_b")
    checks.floating(call, *computed)
    checks.same_device(call, "x", *computed)
    checks.shape(call, "dx", call.x.shape, "x")
    checks.shape(call, "dweight", call.weight.shape, "weight")
    checks.shape(call, "dbias", call.weight.shape[:1], "weight's rows")
    for name, tensor in checks.given(call, ("lora_x", "lora_b")):
        checks.shape(call, f"d{name}", tensor.shape, name)
    return checks.gradients(call, *HEAD)


def _check(call: Any, mask: str) -> None:
    checks.floating(call, "class_weight")
    checks.same_device(call, "x", "class_weight")
    check_linear(call, mask)
    check_token_weight(call, "x")
    checks.shape(call, "class_weight", call.weight.shape[:1], "weight's rows")
    check_options(call, "x")


def check_linear(call: Any, mask: str = "") -> None:
    """Check the arguments of a linear layer whose logits are chunked, and target. `mask` names the
    argument that says whether the gradients of the head's tensors are wanted."""
    check_layer(call)
    check_target(call, "x")
    _check_lora(call)
    check_chunks(call, call.weight)
    for i, name in enumerate(HEAD if mask else ()):
        if getattr(call, mask)[i] and getattr(call, name) is None:
            raise ValueError(
                f"{checks.op(call)}: {mask}[{i}] must be False without a {name}, got"
                f" {list(getattr(call, mask))}"
            )


def check_layer(call: Any, prefix: str = "") -> None:
    """Check x, weight and bias of a linear layer, whose names start with `prefix`."""
    x_name, weight_name, bias_name = (f"{prefix}{name}" for name in ("x", "weight", "bias"))
    op, x, weight = checks.op(call), getattr(call, x_name), getattr(call, weight_name)
    checks.floating(call, x_name)
    checks.at_least_dims(call, x_name, 1, "(..., D)")
    _check_parameters(call, x_name, weight_name, bias_name)
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != D:
        raise ValueError(
            f"{op}: {weight_name} must be (V, D) with D of {x_name}, {D}, and at least one class,"
            f" got {tuple(weight.shape)}"
        )
    checks.shape(call, bias_name, weight.shape[:1], f"{weight_name}'s rows")


def _check_parameters(call: Any, x_name: str, *names: str) -> None:
    """Check that the tensors have the device and dtype of x."""
    checks.floating(call, *names)
    checks.same_device(call, x_name, *names)
    dtype = getattr(call, x_name).dtype
    for name, tensor in checks.given(call, names):
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{checks.op(call)}: {name} must have {x_name}'s dtype, {dtype}, got {tensor.dtype}"
            )


def check_chunks(call: Any, weight: Tensor) -> None:
    op, accum_dtype = checks.op(call), call.accum_dtype
    accepted = {weight.dtype, torch.float64 if weight.dtype is torch.float64 else torch.float32}
    if accum_dtype is not None and accum_dtype not in accepted:
        names = " or ".join(sorted(map(str, accepted)))
        raise ValueError(f"{op}: accum_dtype must be {names} or None, got {accum_dtype}")
    if call.chunk_bytes is not None and call.chunk_bytes < 1:
        raise ValueError(f"{op}: chunk_bytes must be above 0 or None, got {call.chunk_bytes}")


def _check_lora(call: Any) -> None:
    op, lora_x, lora_b = checks.op(call), call.lora_x, call.lora_b
    if lora_x is None and lora_b is None:
        return
    for name, tensor, other in (("lora_x", lora_x, "lora_b"), ("lora_b", lora_b, "lora_x")):
        if tensor is None:
            raise ValueError(f"{op}: {name} must be given with {other}, got None")
    _check_parameters(call, "x", "lora_x", "lora_b")
    checks.at_least_dims(call, "lora_x", 1, "(..., R)")
    R = lora_x.shape[-1:]
    checks.shape(call, "lora_x", (*call.x.shape[:-1], *R), "x but for the last dimension")
    checks.shape(call, "lora_b", (*call.weight.shape[:1], *R), "weight's rows and lora_x's columns")
