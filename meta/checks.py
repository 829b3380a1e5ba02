"""The checks that the meta functions share.

Every message names the op, the argument, what is accepted and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.rms_norm import CASTING_MODES
from ..ops.strides import inverse, memory_order


def floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{op}: {name} must be a floating point tensor, got {tensor.dtype}")


def same_device(op: str, x: Tensor, x_name: str = "x", /, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} must be on {x_name}'s device, {x.device}, got {tensor.device}"
            )


def shape(op: str, name: str, tensor: Tensor | None, expected: Sequence[int], meaning: str) -> None:
    if tensor is not None and tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{op}: {name} must have the shape of {meaning}, {tuple(expected)},"
            f" got {tuple(tensor.shape)}"
        )


def at_least_dims(op: str, x: Tensor, dims: int, form: str, x_name: str = "x") -> None:
    if x.dim() < dims:
        raise ValueError(f"{op}: {x_name} must be {form}, got shape {tuple(x.shape)}")


def choice(op: str, name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        names = ", ".join(map(repr, accepted))
        raise ValueError(f"{op}: {name} must be one of {names}, got {value!r}")


def epsilon(op: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"{op}: eps must be a number of at least 0, got {eps}")


def casting(op: str, weight: Tensor | None, offset: float, casting_mode: str | None = None) -> None:
    if casting_mode is not None:
        choice(op, "casting_mode", casting_mode, CASTING_MODES)
    if weight is None and offset != 0:
        raise ValueError(f"{op}: offset must be 0 without a weight to add it to, got {offset}")


def same_form(op: str, x: Tensor, x_name: str, **tensors: Tensor | None) -> None:
    """Tensors that must be floating point, on x's device and of x's shape."""
    floating(op, **tensors)
    same_device(op, x, x_name, **tensors)
    for name, tensor in tensors.items():
        shape(op, name, tensor, x.shape, x_name)


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the same shape and device."""
    return torch.empty_like(
        tensor, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
    )


def in_layout_of(tensor: Tensor) -> Tensor:
    """An uninitialised dense tensor of the same shape, with its dimensions in the same order."""
    order = memory_order(tensor)
    return tensor.new_empty([tensor.shape[dim] for dim in order]).permute(inverse(order))


def like_if(wanted: bool, tensor: Tensor | None) -> Tensor | None:
    return like(tensor) if wanted and tensor is not None else None
