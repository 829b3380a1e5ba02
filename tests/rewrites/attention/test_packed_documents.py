"""The op that finds the documents of a packed batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_ops.rewrites.attention.packed_documents import PACKED_DOCUMENTS


@given(rows=st.integers(1, 3), length=st.integers(0, 9), data=st.data())
def test_documents(rows: int, length: int, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
    begins = torch.tensor(data.draw(flags), dtype=torch.bool).view(rows, length)
    before = begins.clone()
    cu_seqlens, bounds = PACKED_DOCUMENTS(begins)
    starts = [
        row * length + token
        for row in range(rows)
        for token in range(length)
        if token == 0 or begins[row, token]
    ]
    total = rows * length
    assert cu_seqlens.tolist() == starts + [total] * (total + 1 - len(starts))
    longest = max((end - start for start, end in pairwise([*starts, total])), default=0)
    assert bounds.tolist() == [len(starts), longest]
    assert torch.equal(begins, before)


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "expanded"])
def test_opcheck(strides: str) -> None:
    begins = torch.rand(4, 6) < 0.3
    begins = {"transposed": begins.t(), "expanded": begins[:1].expand(4, 6)}.get(strides, begins)
    torch.library.opcheck(PACKED_DOCUMENTS, (begins,))
