"""Tokens that are hidden from varlen_attention reach no result and no gradient, even as NaN."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import liger_ops
from op_under_test import DEVICE, FOLDERS, NAN
from varlen_calls import FORWARD, call_of, gradients, ints, run

T = 80
HIDDEN = ("query", "key", "value", "dy")


@pytest.mark.device_kernels
@pytest.mark.parametrize("implementation", ("definition", "invariant", *FOLDERS))
def test_what_is_hidden_is_not_read(implementation: str) -> None:
    """Keys and values that key_mask or lengths hides, and every row of a token of no document."""

    @given(
        hidden=st.sets(st.sampled_from(HIDDEN), min_size=1),
        bounds=st.lists(st.integers(0, T), min_size=2, max_size=4).map(sorted),
        visible=st.sampled_from((0.0, 0.5, 0.9, 1.0)), has_lengths=st.booleans(),
        sinks=st.sampled_from((None, 0.3, -float("inf"))), window=st.sampled_from((-1, 0, 3, 40)),
        softcap=st.sampled_from((None, 2.0)), is_causal=st.booleans(),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)), seed=st.integers(0, 99),
    )  # fmt: skip
    def check(
        hidden: set[str], bounds: list[int], visible: float, has_lengths: bool,
        sinks: float | None, window: int, softcap: float | None, is_causal: bool,
        dtype: torch.dtype, seed: int,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        key_mask = torch.rand(T, generator=generator) < visible
        documents = list(pairwise(bounds))
        lengths = ints(*((end - start) // 2 for start, end in documents))
        call = call_of(
            T, ints(*bounds), T, dtype=dtype, key_mask=key_mask.to(DEVICE), engine="triton",
            lengths=lengths if has_lengths else None, softcap=softcap, window_left=window,
            window_right=0 if is_causal else -1,
            sinks=None if sinks is None else torch.full((2,), sinks, device=DEVICE),
        )  # fmt: skip
        dy = torch.randn(call.query.shape, generator=generator).to(DEVICE, dtype)
        tokens = torch.arange(T)
        inside = (tokens >= bounds[0]) & (tokens < bounds[-1])
        is_key = inside & key_mask
        if has_lengths:
            for start, end in documents:
                is_key[start + (end - start) // 2 : end] = False
        poisoned = {**call._asdict(), "dy": dy}
        for name in hidden:
            rows = is_key if name in ("key", "value") else inside
            poisoned[name] = poisoned[name].masked_fill(~rows.to(DEVICE)[:, None, None], NAN)
        folder = "definition" if implementation == "invariant" else implementation
        with liger_ops.invariant() if implementation == "invariant" else nullcontext():
            clean = (*run(folder, call), *gradients(folder, call, dy))
            poisoned_dy = poisoned.pop("dy")
            found = FORWARD.arguments(**poisoned)
            results = (*run(folder, found), *gradients(folder, found, poisoned_dy))
        for result, expected in zip(results, clean, strict=True):
            assert result is expected is None or torch.equal(result, expected)

    check()
