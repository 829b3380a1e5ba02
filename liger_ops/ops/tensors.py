"""Helpers of the definitions: the dtype in which they compute, the memory layout of their results,
comparisons of sizes that may be symbolic, another dimension than the last, and whether memory may
be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..autograd import is_differentiated
from ..torch_private import len_torch_dispatch_stack


def widened(x: Tensor) -> Tensor:
    """Cast x to the dtype of the arithmetic: float64 if x is float64, else float32."""
    return x if x.dtype is torch.float64 else x.float()


def equal(shape: Sequence[int], expected: Sequence[int], name: str) -> bool:
    """Return whether two shapes are equal.

    Tracing cannot compare data-dependent sizes, such as those of `x[mask]` and `target[mask]`. They
    count as equal here, and the compiled graph asserts that they are.
    """
    try:
        return tuple(shape) == tuple(expected)
    except RuntimeError:
        if len(shape) != len(expected):
            return False
        for size, wanted in zip(shape, expected, strict=True):
            torch._check_value(size == wanted, lambda: f"{name} has another shape than expected")
        return True


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


def along_dim(
    owner: str, argument: str, op: Callable[[Tensor], Tensor], x: Tensor, dim: int
) -> Tensor:
    """Apply an op of the last dimension along dimension `dim`.

    Raise ValueError if x lacks that dimension. The message begins with `owner`, the op or module
    called, and calls x by the name `argument`.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{owner}: dim must be one of {argument}'s {x.dim()} dimensions, got {dim}"
        )
    if dim in (-1, x.dim() - 1):
        return op(x)
    return op(x.transpose(dim, -1)).transpose(dim, -1)


def is_eager(*tensors: Tensor) -> bool:
    """Return whether nothing traces, differentiates or transforms the computation on these tensors.

    The computation may then write to its intermediate tensors in place, and may use kernels of ATen
    that hide intermediate values from a trace or a transform.
    """
    return not (
        is_differentiated()
        or torch.compiler.is_compiling()
        or len_torch_dispatch_stack()
        or any(type(tensor) is not Tensor for tensor in tensors)
    )
