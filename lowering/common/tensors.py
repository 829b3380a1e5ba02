"""Operands of kernels with the strides that the kernels expect, and integer arithmetic of sizes."""

from __future__ import annotations

from torch import Tensor


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_width(n: int, most: int) -> int:
    """Return the least power of 2 that is at least n, but no more than `most`, a power of 2.

    For a dynamic n, in a package of AOTInductor, it is `most`, which serves any n.
    """
    return most if type(n) is not int or n >= most else next_power_of_2(n)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy of it if the stride of its last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat(tensor: Tensor | None) -> Tensor | None:
    """Flatten to one contiguous dimension: a view if the tensor is contiguous."""
    return None if tensor is None else tensor.reshape(-1).contiguous()


def streams_of(x: Tensor) -> Tensor:
    """Return x, (..., hc, C), as contiguous (M, hc, C)."""
    return x.reshape(-1, *x.shape[-2:]).contiguous()
