"""linear_cross_entropy: checks and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.heads.gradients import gradient_dtypes
from .. import checks
from ..losses.cross_entropy import (
    check_gradients,
    check_options,
    check_target,
    check_token_weight,
    losses,
)

# The tensors of a head, in the order of masks and gradients.
HEAD = ("x", "weight", "bias", "lora_x", "lora_b")


@library.fake("linear_cross_entropy_forward")
def linear_cross_entropy_forward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "gradient_mask")
    return (*losses(call, call.x), *forward_gradients(call, HEAD))


@library.fake("linear_cross_entropy_backward")
def linear_cross_entropy_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call, "output_mask")
    check_gradients(call, "x")
    check_computed(call, HEAD)
    return checks.gradients(call, *HEAD)


def forward_gradients(call: Any, names: Sequence[str]) -> tuple[Tensor | None, ...]:
    """Allocate the gradients that the forward computes of a head's tensors, which have these
    names in the order of the mask."""
    mask = call.gradient_mask
    if call.reduction == "none" and any(mask):
        raise ValueError(
            f"{checks.op(call)}: gradient_mask must be all False for the reduction 'none', whose"
            f" gradient the backward computes, got {list(mask)}"
        )
    weight = getattr(call, names[1])
    dtypes = gradient_dtypes(weight, mask, call.accum_dtype, in_forward=True)
    return tuple(
        None if dtype is None else checks.like(getattr(call, name), dtype)
        for name, dtype in zip(names, dtypes, strict=True)
    )


def check_computed(call: Any, names: Sequence[str]) -> None:
    """Check a backward op's arguments that are gradients from the forward."""
    computed = ("dx", "dweight", "dbias", "dlora_x", "dlora_b")
    checks.floating(call, *computed)
    checks.same_device(call, names[0], *computed)
    for gradient, name in zip(computed, names, strict=True):
        tensor = getattr(call, name)
        if tensor is not None:
            checks.shape(call, gradient, tensor.shape, name)


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
    check_lora(call)
    check_chunks(call, call.weight)
    if mask:
        check_mask(call, mask, HEAD)


def check_mask(call: Any, mask: str, names: Sequence[str]) -> None:
    """Check that the mask of this name asks for no gradient of a tensor that is None."""
    wanted = list(getattr(call, mask))
    for i, name in enumerate(names):
        if wanted[i] and getattr(call, name) is None:
            raise ValueError(
                f"{checks.op(call)}: {mask}[{i}] must be False without a {name}, got {wanted}"
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


def check_lora(call: Any, prefix: str = "") -> None:
    """Check lora_x and lora_b of a layer, whose names start with `prefix`."""
    op, x_name, weight_name = checks.op(call), f"{prefix}x", f"{prefix}weight"
    names = x_lora, b_lora = f"{prefix}lora_x", f"{prefix}lora_b"
    lora_x, lora_b = (getattr(call, name) for name in names)
    if lora_x is None and lora_b is None:
        return
    for name, tensor, other in ((x_lora, lora_x, b_lora), (b_lora, lora_b, x_lora)):
        if tensor is None:
            raise ValueError(f"{op}: {name} must be given with {other}, got None")
    _check_parameters(call, x_name, *names)
    checks.at_least_dims(call, x_lora, 1, "(..., R)")
    R, x, weight = lora_x.shape[-1:], getattr(call, x_name), getattr(call, weight_name)
    checks.shape(call, x_lora, (*x.shape[:-1], *R), f"{x_name} but for the last dimension")
    meaning = f"{weight_name}'s rows and {x_lora}'s columns"
    checks.shape(call, b_lora, (*weight.shape[:1], *R), meaning)
