"""Memory layouts of results that follow the layout of an input."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Return x's dimensions by descending stride, the last dimension last.

    An expanded x has strides of 0 and no such order: it is treated as contiguous.
    """
    leading = range(x.dim() - 1)
    if any(x.stride(dim) == 0 for dim in leading):
        return list(range(x.dim()))
    return [*sorted(leading, key=x.stride, reverse=True), x.dim() - 1]


def inverse(order: list[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def in_order_of(values: Tensor, x: Tensor) -> Tensor:
    """Lay values out densely, with x's order of dimensions in memory; copy only if necessary."""
    order = memory_order(x)
    dense = values.permute(order).contiguous()
    # `contiguous` leaves the stride of a dimension of size 1 as it is. Flattened and viewed again,
    # it has the stride that the shape gives, as the fakes and the kernels' outputs have.
    return dense.flatten().view(dense.shape).permute(inverse(order))


def is_transposed(x: Tensor) -> bool:
    """Return whether x is a stack of matrices in column-major order."""
    return x.dim() > 2 and x.stride(-2) < x.stride(-1)


def dense(values: Tensor, x: Tensor) -> Tensor:
    """Lay values out densely, a stack of matrices in x's row- or column-major order.

    values are copied only if necessary.
    """
    if not is_transposed(x):
        return values.contiguous()
    rows = values.mT.contiguous()
    # As in `in_order_of`: dimensions of size 1 get the strides that the shape gives.
    return rows.flatten().view(rows.shape).mT
