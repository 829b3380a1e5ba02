"""How the kernels of either device see tensors of which each element is for itself."""

from __future__ import annotations

from torch import Tensor

# One row of everything is as long as the batch is large. A multiple of this whatever the batch, its
# length never has another kernel compiled, for Triton tells multiples of 16 from other sizes.
FLAT_WIDTH = 16


def as_rows(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Tensors of one shape, but for the last dimension, as (M, N) with unit stride in it.

    One row of everything where all are contiguous; else rows that may lie apart, without a copy
    wherever there is such a view.
    """
    tensors = (first, *others)
    flat = _width(first) % FLAT_WIDTH == 0 and all(
        tensor is None or tensor.is_contiguous() for tensor in tensors
    )
    if flat:
        return [None if tensor is None else tensor.view(1, -1) for tensor in tensors]
    return [None if tensor is None else _rows(tensor) for tensor in tensors]


def row_stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _width(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, _width(x))
    return flat if flat.stride(1) == 1 else flat.contiguous()


def parts(
    gate: Tensor | None, up: Tensor | None, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """gate and up as views of their own, where they are the halves of one tensor."""
    if gate is None or up is not None or interleaved:
        return gate, up
    N = gate.shape[-1] // 2
    return gate[..., :N], gate[..., N:]
