"""The LoRA of a head: its arguments, and the input that it gives to a loss's second product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .head import cast_as_linear


def lora_input(
    op: str, x: Tensor, weight: Tensor,
    lora_a: Tensor | None, lora_b: Tensor | None, lora_scale: float,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """lora_x = lora_scale * x @ lora_a.T, and lora_b, both in x's dtype; or None and None.

    x is cast to lora_a's dtype for the product, as peft does, and autocast casts both.
    """
    if lora_a is None and lora_b is None:
        return None, None
    R = None if lora_a is None else lora_a.shape[:1]
    _check(op, x, "lora_a", lora_a, "lora_b", "(R, D) with D of x", (*(R or ()), *x.shape[-1:]))
    classes = (*weight.shape[:1], *(R or ()))
    meaning = "(V, R) with V of weight and R of lora_a"
    _check(op, x, "lora_b", lora_b, "lora_a", meaning, classes)
    assert lora_a is not None and lora_b is not None
    lora_a, lora_b, _ = cast_as_linear(lora_a, lora_b, None)
    lora_x = lora_scale * torch.nn.functional.linear(x.to(lora_a.dtype), lora_a)
    return lora_x.to(x.dtype), lora_b.to(x.dtype)


def _check(
    op: str, x: Tensor, name: str, tensor: Tensor | None, other: str, form: str,
    shape: Sequence[int],
) -> None:  # fmt: skip
    if tensor is None:
        raise ValueError(f"{op}: {name} must be given with {other}, got None")
    if not tensor.is_floating_point():
        raise TypeError(f"{op}: {name} must be a floating point tensor, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} must be on x's device, {x.device}, got {tensor.device}")
    if tuple(tensor.shape) != tuple(shape) or tensor.dim() != 2:
        raise ValueError(f"{op}: {name} must be {form}, {tuple(shape)}, got {tuple(tensor.shape)}")
