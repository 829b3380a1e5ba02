"""The LoRA of a head: its arguments, and lora_x, the input of the second product of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .head import cast_as_linear


def lora_input(
    op: str, x: Tensor, weight: Tensor,
    lora_a: Tensor | None, lora_b: Tensor | None, lora_scale: float, prefix: str = "",
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return lora_x = lora_scale * x @ lora_a.T, and lora_b, both as `narrowed` to x's dtype.

    Without a LoRA, return None and None. x is cast to lora_a's dtype for the product, as peft does,
    and autocast casts lora_a and lora_b. Messages put `prefix` before the names of the op's
    arguments.
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
    return narrowed(lora_x, lora_b, x.dtype)


def narrowed(lora_x: Tensor, lora_b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return lora_x and lora_b in a narrower dtype, with nearly the same product.

    Each number of a wider dtype is split into a rounded number and the rounded rest:
    x = x_hi + x_lo, b = b_hi + b_lo. The product is x_hi @ b_hi + x_lo @ b_hi + x_hi @ b_lo, as one
    product of concatenated columns: R is three times as large. x_lo @ b_lo is left out.
    """
    x, b = lora_x.to(dtype), lora_b.to(dtype)
    if (
        torch.promote_types(dtype, lora_x.dtype)
        == torch.promote_types(dtype, lora_b.dtype)
        == dtype
    ):
        return x, b
    # The rounded numbers occur twice. They are cast twice, so that autograd adds the two gradients
    # in the wider dtype.
    xs = x, _rest(lora_x, x), lora_x.to(dtype)
    return torch.cat(xs, -1), torch.cat([b, lora_b.to(dtype), _rest(lora_b, b)], -1)


def _rest(wide: Tensor, rounded: Tensor) -> Tensor:
    """Return wide - rounded, in rounded's dtype.

    It is a constant to autograd: the gradient of the rounded numbers is that of the wide ones.
    """
    rest = wide.detach() - rounded.detach()
    # A number that overflows is inf in `rounded`. Its rest, -inf or NaN, is set to 0: with it, the
    # sum of the products would be NaN.
    return rest.nan_to_num(0.0, 0.0, 0.0).to(rounded.dtype)


def _check(
    op: str, x: Tensor, x_name: str, name: str, tensor: Tensor | None, other: str, meaning: str,
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
        raise ValueError(
            f"{op}: {name} must be {meaning}, {tuple(shape)}, got {tuple(tensor.shape)}"
        )
