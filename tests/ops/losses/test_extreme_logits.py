"""Losses of logits that are all very large or very low, or that have a large number in common."""

from __future__ import annotations

from functools import partial

import pytest

import liger_ops
from extreme_logits import LOSSES, assert_as_near_as_pytorch, rows, values_and_gradient
from liger_ops import library
from op_under_test import FOLDERS


@pytest.mark.parametrize(
    ("where", "V"), [("definition", 40), *((folder, V) for folder in FOLDERS for V in (40, 8200))]
)
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits(monkeypatch: pytest.MonkeyPatch, name: str, where: str, V: int) -> None:
    loss, reference, infinite = LOSSES[name]
    if where != "definition":
        for op in library.OPS.values():
            if where in op.kernels:
                monkeypatch.setattr(op, "definition", op.kernels[where])
    x, y = rows(V, 0, infinite), rows(V, 1, infinite)
    assert_as_near_as_pytorch(values_and_gradient(partial(loss, liger_ops), x, y), reference, x, y)
