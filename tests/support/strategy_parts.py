"""Sizes, rows and tiles that the strategies of several ops draw from."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from op_under_test import Case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One, odd, prime, around a power of two, and round as in models.
SIZES = (1, 2, 3, 7, 13, 16, 31, 64, 127, 128, 129, 257, 300, 768, 1021)
ROWS = (0, 1, 2, 3, 5, 9)
# Small tiles, so that a program loops over several and a row needs several.
TILES = (None, (1, 16), (2, 16), (4, 64), (1, 64), (2, 1024))


def leading_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.one_of(
        st.just(()),
        st.tuples(st.sampled_from(ROWS)),
        st.tuples(st.integers(1, 2), st.sampled_from(ROWS)),
        st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    )


def has_rows(case: Case) -> bool:
    """Whether the first dimension has several rows."""
    return len(case.shape) > 1 and case.shape[0] > 1
