"""mhc_pre against float64 truth."""

from __future__ import annotations

import torch

import op_checks
from op_table import OPS

OP = OPS["mhc_pre"]


def test_shapes() -> None:
    assert OP.overload()(torch.randn(3, 4), torch.randn(3)).shape == (4,)
    streams = "x must be (..., hc, C), with 1 to 64 streams and at least one channel, got shape"
    for shape, h_shape, message in (
        ((4,), (4,), "x must be (..., hc, C), got shape (4,)"),
        ((2, 65, 4), (2, 65), f"{streams} (2, 65, 4)"),
        ((2, 3, 0), (2, 3), f"{streams} (2, 3, 0)"),
        ((2, 3, 4), (2, 4), "h_pre must have the shape of x but for its last dimension, (2, 3)"),
    ):
        op_checks.assert_rejects(OP, (torch.randn(shape), torch.randn(h_shape)), message)
