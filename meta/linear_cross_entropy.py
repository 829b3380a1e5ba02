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
    op, x, weight, accum_dtype = checks.op(call), call.x, call.weight, call.accum_dtype
    parameters = HEAD[1:]
    checks.floating(call, "x", *parameters)
    checks.at_least_dims(call, "x", 1, "(..., D)")
    checks.same_device(call, "x", *parameters)
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != D:
        raise ValueError(
            f"{op}: weight must be (V, D) with D of x, {D}, and at least one class,"
            f" got {tuple(weight.shape)}"
        )
    for name, tensor in checks.given(call, parameters):
        if tensor.dtype is not x.dtype:
            raise TypeError(f"{op}: {name} must have x's dtype, {x.dtype}, got {tensor.dtype}")
    check_target(call, "x")
    checks.shape(call, "bias", weight.shape[:1], "weight's rows")
    _check_lora(call)
    accepted = {weight.dtype, torch.float64 if weight.dtype is torch.float64 else torch.float32}
    if accum_dtype is not None and accum_dtype not in accepted:
        names = " or ".join(sorted(map(str, accepted)))
        raise ValueError(f"{op}: accum_dtype must be {names} or None, got {accum_dtype}")
    if call.chunk_bytes is not None and call.chunk_bytes < 1:
        raise ValueError(f"{op}: chunk_bytes must be above 0 or None, got {call.chunk_bytes}")
    for i, name in enumerate(HEAD if mask else ()):
        if getattr(call, mask)[i] and getattr(call, name) is None:
            raise ValueError(
                f"{op}: {mask}[{i}] must be False without a {name}, got {list(getattr(call, mask))}"
            )


def _check_lora(call: Any) -> None:
    op, lora_x, lora_b = checks.op(call), call.lora_x, call.lora_b
    if lora_x is None and lora_b is None:
        return
    for name, tensor, other in (("lora_x", lora_x, "lora_b"), ("lora_b", lora_b, "lora_x")):
        if tensor is None:
            raise ValueError(f"{op}: {name} must be given with {other}, got None")
    checks.at_least_dims(call, "lora_x", 1, "(..., R)")
    R = lora_x.shape[-1:]
    checks.shape(call, "lora_x", (*call.x.shape[:-1], *R), "x but for the last dimension")
    checks.shape(call, "lora_b", (*call.weight.shape[:1], *R), "weight's rows and lora_x's columns")
