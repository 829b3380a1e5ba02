"""Checks that fakes share; each takes a call and the names of the arguments to check.

Every message names the op, the argument, the accepted values and the value given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.shapes import equal
from ..ops.strides import inverse, memory_order


def op(call: Any) -> str:
    """The op's name in error messages."""
    return type(call).__name__


def given(call: Any, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Name and tensor of each argument in `names` that is not None."""
    pairs = [(name, getattr(call, name)) for name in names]
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


def floating(call: Any, *names: str) -> None:
    for name, tensor in given(call, names):
        if not tensor.is_floating_point():
            raise TypeError(
                f"{op(call)}: {name} must be a floating point tensor, got {tensor.dtype}"
            )


def same_device(call: Any, x: str, *names: str) -> None:
    device = getattr(call, x).device
    for name, tensor in given(call, names):
        if tensor.device != device:
            raise ValueError(
                f"{op(call)}: {name} must be on {x}'s device, {device}, got {tensor.device}"
            )


def shape(call: Any, name: str, expected: Sequence[int], meaning: str) -> None:
    tensor = getattr(call, name)
    if tensor is not None and not equal(tensor.shape, expected, f"{op(call)}: {name}"):
        raise ValueError(
            f"{op(call)}: {name} must have the shape of {meaning}, {tuple(expected)},"
            f" got {tuple(tensor.shape)}"
        )


def at_least_dims(call: Any, x: str, dims: int, form: str) -> None:
    tensor = getattr(call, x)
    if tensor.dim() < dims:
        raise ValueError(f"{op(call)}: {x} must be {form}, got shape {tuple(tensor.shape)}")


def at_least_one(call: Any, x: str, what: str, dim: int = -1) -> None:
    """Check a dimension of the argument named `x`."""
    shape = tuple(getattr(call, x).shape)
    if shape[dim] < 1:
        raise ValueError(f"{op(call)}: {x} must have at least one {what}, got {shape}")


def choice(call: Any, name: str, accepted: Sequence[str]) -> None:
    value = getattr(call, name)
    if value not in accepted:
        names = ", ".join(map(repr, accepted))
        raise ValueError(f"{op(call)}: {name} must be one of {names}, got {value!r}")


def epsilon(call: Any) -> None:
    if not call.eps >= 0:
        raise ValueError(f"{op(call)}: eps must be a number of at least 0, got {call.eps}")


def same_form(call: Any, x: str, *names: str) -> None:
    """Check that tensors are floating point, with the device and shape of the one named `x`."""
    floating(call, *names)
    same_device(call, x, *names)
    for name in names:
        shape(call, name, getattr(call, x).shape, x)


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialised contiguous tensor of the same shape and device."""
    return torch.empty_like(
        tensor, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
    )


def wide(*tensors: Tensor | None) -> torch.dtype:
    """float32, or float64 if a tensor is float64."""
    given = [tensor.dtype for tensor in tensors if tensor is not None]
    return torch.float64 if torch.float64 in given else torch.float32


def gradients(
    call: Any, *names: str, allocate: Callable[[Tensor], Tensor] = like
) -> tuple[Tensor | None, ...]:
    """Allocate the gradients of the tensors in `names` that call.output_mask asks for."""
    tensors = (getattr(call, name) for name in names)
    return tuple(
        allocate(tensor) if wanted and tensor is not None else None
        for wanted, tensor in zip(call.output_mask, tensors, strict=True)
    )


def in_layout_of(tensor: Tensor) -> Tensor:
    """Allocate an uninitialised dense tensor of the same shape and order of dimensions."""
    order = memory_order(tensor)
    return tensor.new_empty([tensor.shape[dim] for dim in order]).permute(inverse(order))
