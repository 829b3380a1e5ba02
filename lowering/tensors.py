"""Operands of kernels in the strides that they read."""

from __future__ import annotations

from torch import Tensor


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def flat(tensor: Tensor | None) -> Tensor | None:
    """The elements one after the other: a contiguous tensor's view."""
    return None if tensor is None else tensor.reshape(-1).contiguous()
