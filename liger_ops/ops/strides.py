"""The layout in memory of what an op allocates, where it follows an input's."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """x's dimensions from the slowest in memory to the fastest, the last dimension last.

    An expanded x, which has no order, is taken as contiguous.
    """
    leading = range(x.dim() - 1)
    if any(x.stride(dim) == 0 for dim in leading):
        return list(range(x.dim()))
    return [*sorted(leading, key=x.stride, reverse=True), x.dim() - 1]


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def in_order_of(values: Tensor, x: Tensor) -> Tensor:
    """The values, dense, with their dimensions in the order of x's."""
    order = memory_order(x)
    return values.permute(order).contiguous().permute(inverse(order))
