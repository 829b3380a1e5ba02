"""Equivalent calls of rope, the module's calls, and invalid calls."""

from __future__ import annotations

import torch

import liger_ops
from rotary_inputs import heads, rotary_angles, rotary_tables


def test_conjugate_frequencies_rotate_back() -> None:
    q, k = heads(torch.float32)
    freqs_cis = torch.polar(torch.ones(()), rotary_angles())
    forth = liger_ops.rope(q, k, freqs_cis)
    for x, y in zip((q, k), liger_ops.rope(*forth, freqs_cis.conj()), strict=True):
        torch.testing.assert_close(x, y)


def test_tables_are_shared_or_of_the_batch() -> None:
    q, k = heads(torch.float64)
    cos, sin = rotary_tables(torch.float64)
    shared = [liger_ops.rope(q, k, cos[0][index], sin[0][index]) for index in (..., None)]
    expanded = liger_ops.rope(q, k, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1))
    for outputs in shared:
        for a, b in zip(outputs, expanded, strict=True):
            assert torch.equal(a, b)
