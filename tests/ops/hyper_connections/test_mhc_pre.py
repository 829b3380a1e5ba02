"""mhc_pre against float64 truth."""

from __future__ import annotations

import pytest
import torch

import op_checks
from op_table import OPS

OP = OPS["mhc_pre"]


@pytest.mark.parametrize(
    ("shape", "h_shape", "message"),
    [
        ((3, 4), (3,), None),
        ((4,), (4,), "mhc_pre: x must be (..., hc, C), got shape (4,)"),
        (
            (2, 65, 4), (2, 65),
            "mhc_pre: x must be (..., hc, C), with 1 to 64 streams and at least one channel, got"
            " shape (2, 65, 4)",
        ),
        (
            (2, 3, 0), (2, 3),
            "mhc_pre: x must be (..., hc, C), with 1 to 64 streams and at least one channel, got"
            " shape (2, 3, 0)",
        ),
        (
            (2, 3, 4), (2, 4),
            "mhc_pre: h_pre must have the shape of x but for its last dimension, (2, 3), got"
            " (2, 4)",
        ),
    ],
)  # fmt: skip
def test_shapes(shape: tuple[int, ...], h_shape: tuple[int, ...], message: str | None) -> None:
    args = (torch.randn(shape), torch.randn(h_shape))
    if message is None:
        assert OP.overload()(*args).shape == (*shape[:-2], shape[-1])
    else:
        op_checks.assert_rejects(OP, args, message)
