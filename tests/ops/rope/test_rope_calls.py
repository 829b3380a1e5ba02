"""Equivalent calls of rope, the module's calls, and invalid calls."""

from __future__ import annotations

import pytest
import torch

import liger_ops
import op_checks
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


def test_rejects() -> None:
    q, k, table = torch.zeros(2, 4, 3, 8), torch.zeros(2, 1, 3, 8), torch.zeros(3, 8)
    freqs_cis, three = torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(3, 2, 3, 8)
    form = "(S, R), (1, S, R) or (B, S, R)"
    per_pair = "(S, R/2), (1, S, R/2) or (B, S, R/2)"
    sizes = "for q's S of 3 and B of 2, got shape"
    for args, message in (
        ((q[0], k, table, table), "q must be (B, H, S, D), got shape (4, 3, 8)"),
        (
            (q, k[:, :, :2], table, table),
            "k must have the shape of (B, H', S, D) for q of (B, H, S, D),",
        ),
        ((q, k, table[:2], table), f"cos must be {form} {sizes} (2, 8)"),
        ((q, k, three, three), f"cos must be {form} {sizes} (3, 2, 3, 8)"),
        ((q, k, freqs_cis[:2]), f"cos must be {per_pair} {sizes} (2, 4)"),
        ((q, k, table[:2], table, False, True), f"cos must be {per_pair} {sizes} (2, 8)"),
        (
            (q, k, table, table, False, False, [1, 1, 2]),
            f"cos must be (3, 1, S, R) or (3, B, S, R), with sections, {sizes} (3, 8)",
        ),
        ((q, k, table[:, :5], table), "cos must have an even number of columns from 2 to q's D of"),
        ((q, k, table, table, False, True), "cos must have from 1 column to half of q's D of 8,"),
        ((q, k, table, table[:, :4]), "sin must have the shape of cos, (3, 8), got (3, 4)"),
        ((q, k, table), "sin must be given with a real cos, except matrices (..., S, R/2, 2, 2),"),
        (
            (q, k, torch.zeros(4, 4, 2, 2)),
            "cos must be (S, R/2, 2, 2), (1, S, R/2, 2, 2) or (B, S, R/2, 2, 2)"
            f" {sizes} (4, 4, 2, 2)",
        ),
        ((q, k, torch.zeros(3, 5, 2, 2)), "cos must have from 1 column to half of q's D of 8, one"),
        (
            (q, k, torch.zeros(3, 3, 4, 2, 2), None, False, False, [1, 1, 2]),
            "sections must be None with matrices, got [1, 1, 2]",
        ),
        ((q, k, table, table, False, False, None, True), "deinterleave must be False with"),
        ((q, k, freqs_cis, table), "sin must be None with a complex cos, which holds it, got a"),
        ((q, k, three, three, False, False, [1, 1, 1]), "sections must be three counts of pairs"),
        ((q, k, three, three, False, False, [5, -1, 0]), "sections must be three counts of pairs"),
        ((q, k, three, three, False, False, [2, 2]), "sections must be three counts of pairs that"),
    ):
        op_checks.assert_rejects(OP, args, message)
    with pytest.raises(TypeError, match="rope: k must have q's dtype, torch.float32, got"):
        liger_ops.rope(q, k.double(), table, table)
    with pytest.raises(TypeError, match="rope: a complex cos must be torch.complex64 or"):
        liger_ops.rope(q, k, freqs_cis.to(torch.complex32))
    with pytest.raises(TypeError, match="rope: sin must be a floating point tensor, got"):
        liger_ops.rope(q, k, table, freqs_cis)
