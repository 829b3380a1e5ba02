"""Views of tensors as (M, N), for the elementwise kernels of every device."""

from __future__ import annotations

from torch import Tensor

# The length of one flat row depends on the batch size. Triton specialises kernels on numbers that
# are multiples of 16: if the width is a multiple, so is the length for every batch size, and one
# kernel is compiled.
FLAT_WIDTH = 16


def as_rows(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """View tensors, equal in shape except for the last dimension, as (M, N) with unit stride in N.

    If all are contiguous and the width is a multiple of FLAT_WIDTH, each becomes one row. Otherwise
    rows may be apart in memory; a tensor is copied only if no such view exists.
    """
    tensors = (first, *others)
    flat = _width(first) % FLAT_WIDTH == 0 and all(
        tensor is None or tensor.is_contiguous() for tensor in tensors
    )
    if flat:
        return [None if tensor is None else tensor.view(1, -1) for tensor in tensors]
    return [None if tensor is None else _rows(tensor) for tensor in tensors]


def row_stride(rows: Tensor | None) -> int:
    """Return the stride over rows; 0 for an absent tensor."""
    return 0 if rows is None else rows.stride(0)


def _width(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, _width(x))
    return flat if flat.stride(1) == 1 else flat.contiguous()


def parts(
    gate: Tensor | None, up: Tensor | None, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Split a packed gate into views of its halves, gate and up, unless it is interleaved."""
    if gate is None or up is not None or interleaved:
        return gate, up
    N = gate.shape[-1] // 2
    return gate[..., :N], gate[..., N:]
