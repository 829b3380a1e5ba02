"""The LoRA of a head: its arguments, and the input that it gives to a loss's second product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .head import cast_as_linear


def lora_input(
    op: str, x: Tensor, weight: Tensor,
    lora_a: Tensor | None, lora_b: Tensor | None, lora_scale: float, prefix: str = "",
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """lora_x = lora_scale * x @ lora_a.T, and lora_b, both in x's dtype; or None and None.

    x is cast to lora_a's dtype for the product, as peft does, and autocast casts both. `prefix` is
    that of the names of the op's arguments.
    """
    if lora_a is None and lora_b is None:
        return None, None
    R = None if lora_a is None else lora_a.shape[:1]
    names = [f"{prefix}{name}" for name in ("x", "weight", "lora_a", "lora_b")]
    x_name, weight_name, a_name, b_name = names
    columns = (*(R or ()), *x.shape[-1:])
    _check(op, x, x_name, a_name, lora_a, b_name, f"(R, D) with D of {x_name}", columns)
    classes = (*weight.shape[:1], *(R or ()))
    meaning = f"(V, R) with V of {weight_name} and R of {a_name}"
    _check(op, x, x_name, b_name, lora_b, a_name, meaning, classes)
    assert lora_a is not None and lora_b is not None
    lora_a, lora_b, _ = cast_as_linear(lora_a, lora_b, None)
    lora_x = lora_scale * torch.nn.functional.linear(x.to(lora_a.dtype), lora_a)
    return lora_x.to(x.dtype), lora_b.to(x.dtype)


def _check(
    op: str, x: Tensor, x_name: str, name: str, tensor: Tensor | None, other: str, form: str,
    shape: Sequence[int],
) -> None:  # fmt: skip
    if tensor is None:
        raise ValueError(f"{op}: {name} must be given with {other}, got None")
    if not tensor.is_floating_point():
        raise TypeError(f"{op}: {name} must be a floating point tensor, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(
            f"{op}: {name} must be on {x_name}'s device, {x.device}, got {tensor.device}"
        )
    if tuple(tensor.shape) != tuple(shape) or tensor.dim() != 2:
        raise ValueError(f"{op}: {name} must be {form}, {tuple(shape)}, got {tuple(tensor.shape)}")
