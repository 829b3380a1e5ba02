"""Checks that fakes share, each of a call and the names of the arguments to check, and allocations.

Every message names the op, the argument, the accepted values and the value that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.tensors import equal, inverse, memory_order


def op(call: Any) -> str:
    """Return the op's name for error messages."""
    return type(call).__name__


def given(call: Any, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the name and the tensor of each argument in `names` that is not None."""
    pairs = [(name, getattr(call, name)) for name in names]
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


def floating(call: Any, *names: str) -> None:
    for name, tensor in given(call, names):
        if not tensor.is_floating_point():
            raise TypeError(
                f"{op(call)}: {name} must be a floating point tensor, got {tensor.dtype}"
            )


def shape(call: Any, name: str, expected: Sequence[int], meaning: str) -> None:
    tensor = getattr(call, name)
    if tensor is not None and not equal(tensor.shape, expected, f"{op(call)}: {name}"):
        raise ValueError(
            f"{op(call)}: {name} must have the shape of {meaning}, {tuple(expected)},"
            f" got {tuple(tensor.shape)}"
        )


def at_least_one(call: Any, x: str, element: str, dim: int = -1) -> None:
    """Check that the dimension `dim` of the argument named `x` is not empty. `element` is the word
    for one of its elements, such as "class"."""
    shape = tuple(getattr(call, x).shape)
    if shape[dim] < 1:
        raise ValueError(f"{op(call)}: {x} must have at least one {element}, got {shape}")


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialised contiguous tensor of the same shape and device."""
    return torch.empty_like(
        tensor, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
    )


def wide(*tensors: Tensor | None) -> torch.dtype:
    """Return float32, or float64 if a tensor is float64."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def in_layout_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialised dense tensor of the same shape and order of dimensions."""
    order = memory_order(tensor)
    shape = [tensor.shape[dim] for dim in order]
    return tensor.new_empty(shape, dtype=dtype).permute(inverse(order))
