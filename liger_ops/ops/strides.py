"""The memory layout of results that follow the layout of an input."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """x's dimensions by descending stride, the last dimension last.

    An expanded x has no such order, and is treated as contiguous.
    """
    leading = range(x.dim() - 1)
    if any(x.stride(dim) == 0 for dim in leading):
        return list(range(x.dim()))
    return [*sorted(leading, key=x.stride, reverse=True), x.dim() - 1]


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def in_order_of(values: Tensor, x: Tensor) -> Tensor:
    """Copy values, if necessary, to a dense layout with x's order of dimensions in memory."""
    order = memory_order(x)
    dense = values.permute(order).contiguous()
    # `contiguous` may leave any stride to a dimension of size 1; a new tensor's is given by its
    # shape, as that of a fake or a kernel's output is.
    return dense.flatten().view(dense.shape).permute(inverse(order))


def is_transposed(x: Tensor) -> bool:
    """Whether x is a stack of matrices in column order."""
    return x.dim() > 2 and x.stride(-2) < x.stride(-1)


def dense(values: Tensor, x: Tensor) -> Tensor:
    """Copy values, if necessary, to a dense layout, in which a stack of matrices has x's order."""
    if not is_transposed(x):
        return values.contiguous()
    rows = values.mT.contiguous()
    # As above, of dimensions of size 1.
    return rows.flatten().view(rows.shape).mT
