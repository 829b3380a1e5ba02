"""The chunks of linear_cross_entropy: how many, of how many rows, and the memory that they take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from head_calls import EVERY_DTYPE, call, leaves
from liger_ops.lowering.common.heads.chunked_head import chunked_tokens
from liger_ops.ops.heads.gradients import WEIGHT, gradient_dtypes
from liger_ops.ops.heads.head import ENVIRONMENT, Head, chunks
from linear_cross_entropy_cases import HeadCase


@given(
    M=st.integers(0, 5000), row_bytes=st.integers(1, 5000), chunk_bytes=st.integers(1, 10_000_000)
)
def test_chunks_cover_the_rows_within_the_budget(M: int, row_bytes: int, chunk_bytes: int) -> None:
    slices = list(chunks(M, row_bytes, chunk_bytes))
    assert [row for s in slices for row in range(s.start, s.stop)] == list(range(M))
    sizes = [s.stop - s.start for s in slices]
    fitting = max(1, chunk_bytes // row_bytes)
    assert max(sizes) <= fitting
    assert len(set(sizes[:-1])) <= 1
    if len(sizes) > 1 and fitting >= 128:
        assert sizes[0] % 128 == 0
        fitting -= fitting % 128
    assert len(sizes) <= max(1, math.ceil(M / fitting))


def test_the_environment_gives_the_chunks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert [s.stop for s in chunks(2**18, 4096, None)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**20)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**30)] == [2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**29)] == [2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**29 - 1)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, 2**29, 0, 2**29)] == [2**17, 2**18]
    monkeypatch.setenv(ENVIRONMENT, str(2**28))
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**30)] == [2**16 * i for i in range(1, 5)]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**30)] == [2**16, 2**17, 3 * 2**16, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, 2**30)] == [2**18]
    for value in ("", "0", "-1", "1GB"):
        monkeypatch.setenv(ENVIRONMENT, value)
        with pytest.raises(ValueError, match=f"{ENVIRONMENT} must be a number of bytes above 0"):
            list(chunks(1, 1, None))


@pytest.mark.parametrize(
    ("M", "D", "dtype", "accum_dtype", "count"),
    (
        # With a sum: 1002 MiB of it, 512 of a chunk, less the gradient that is not there yet.
        (4096, 2048, torch.bfloat16, None, 1),
        (8192, 2048, torch.bfloat16, None, 4),
        (8192, 4096, torch.bfloat16, None, 1),
        (8320, 4096, torch.bfloat16, None, 3),
        (8192, 4096, torch.bfloat16, torch.float32, 2),
        (8192, 4096, torch.bfloat16, torch.bfloat16, 4),
        (4096, 2048, torch.float16, None, 2),
        (4096, 2048, torch.float32, None, 4),
    ),
)
def test_one_chunk_where_it_takes_no_more_than_several_and_their_sum(
    M: int, D: int, dtype: torch.dtype, accum_dtype: torch.dtype | None, count: int
) -> None:
    x = torch.empty(M, D, dtype=dtype, device="meta")
    weight = torch.empty(128256, D, dtype=dtype, device="meta")
    dtypes = gradient_dtypes(weight, [True] * 5, accum_dtype, in_forward=True)
    dweight = torch.empty_like(weight, dtype=dtypes[WEIGHT])
    chunked = chunked_tokens(Head(x, weight), dweight, 16, accum_dtype, None)
    assert len(chunked.slices) == count
    # A float16 gradient is kept in float32 until the backward scales it.
    outputs = [None, dweight, None, None, None]
    total = chunked.gradients(outputs).sums[WEIGHT]
    in_place = count == 1 or dtype is not torch.bfloat16 or accum_dtype is torch.bfloat16
    assert (total.dtype is dweight.dtype) == in_place
    assert in_place or total.dtype is torch.float32


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@EVERY_DTYPE
def test_the_number_of_chunks_does_not_matter(dtype: torch.dtype, reduction: str) -> None:
    case = HeadCase(shape=(33,), dtype=dtype, reduction=reduction, ignored="none")
    results = []
    for rows in (None, 1, 4, 32):
        args, tensors = leaves(case)
        args[14] = rows and rows * case.V * dtype.itemsize
        loss = call(args)
        grads = torch.autograd.grad(loss, tensors, torch.ones_like(loss))
        results.append((loss, *grads))
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            torch.testing.assert_close(a, b)
