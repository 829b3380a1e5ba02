"""Equivalent calls of rope, the module's calls, and invalid calls."""

from __future__ import annotations

import torch

import liger_ops
from op_table import OPS
from rotary_inputs import heads, rotary_angles, rotary_tables

OP = OPS["rope"]


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


def test_module() -> None:
    q, k = heads(torch.float32)
    for interleaved in (False, True):
        tables = rotary_tables(torch.float32, interleaved)
        module = liger_ops.nn.Rope(interleaved)
        expected = liger_ops.rope(q, k, *tables, interleaved)
        for a, b in zip(module(q, k, *tables), expected, strict=True):
            assert torch.equal(a, b)
    angles = rotary_angles()
    tables = angles.cos(), angles.sin()
    freqs_cis = torch.complex(*tables)
    three = tuple(torch.stack((table, table + 1, table - 1)) for table in tables)
    for module, args, options in (
        (liger_ops.nn.Rope(per_pair=True), tables, (False, True)),
        (liger_ops.nn.Rope(), (freqs_cis,), ()),
        (liger_ops.nn.Rope(True, True, (2, 3, 3)), three, (True, True, [2, 3, 3])),
        (liger_ops.nn.Rope(True, True, None, True), tables, (True, True, None, True)),
    ):
        expected = liger_ops.rope(q, k, *args, *options)
        for a, b in zip(module(q, k, *args), expected, strict=True):
            assert torch.equal(a, b)
