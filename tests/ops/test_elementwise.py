"""Elementwise kernels view tensors as rows, without a copy if such a view exists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_ops.lowering.common.activations.activations import as_rows, parts, row_stride


def test_contiguous_tensors_are_one_row() -> None:
    x = torch.randn(3, 5, 32)
    rows = as_rows(x, None, x + 1)
    assert [None if row is None else tuple(row.shape) for row in rows] == [(1, 480), None, (1, 480)]
    assert rows[0].data_ptr() == x.data_ptr()


def test_the_halves_of_a_projection_are_read_where_they_lie() -> None:
    packed = torch.randn(2, 3, 64)
    gate, up = parts(packed, None, False)
    y, *halves = as_rows(torch.empty(2, 3, 32), gate, up)
    assert y.shape == halves[0].shape == halves[1].shape == (6, 32)
    assert [half.data_ptr() for half in halves] == [packed.data_ptr(), packed[..., 32:].data_ptr()]
    assert [row_stride(half) for half in halves] == [64, 64]
    assert row_stride(None) == 0


@pytest.mark.parametrize("shape", ((), (1,), (7,), (3, 1), (2, 3, 5), (1, 1, 16), (4, 16)))
@pytest.mark.parametrize("form", ("contiguous", "transposed", "expanded", "every-other"))
def test_rows_hold_the_same_values(shape: tuple[int, ...], form: str) -> None:
    def formed(x: Tensor) -> Tensor:
        if not shape or form == "contiguous":
            return x
        if form == "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if form == "expanded":
            return x.flatten()[0].expand(shape)
        return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]

    x, other = formed(torch.randn(shape)), torch.randn(shape)
    for original, rows in zip((x, other), as_rows(x, other), strict=True):
        assert rows.dim() == 2 and (rows.stride(1) == 1 or rows.shape[1] == 1)
        assert torch.equal(rows.reshape(-1), original.reshape(-1))
