"""mhc_post_res against float64 truth."""

from __future__ import annotations

import torch

import op_checks
from op_table import OPS

OP = OPS["mhc_post_res"]


def test_shapes() -> None:
    x, f_out, h = torch.randn(5, 3, 4), torch.randn(5, 4), torch.randn(5, 3)
    for args, message in (
        ((x, f_out, h, h), "h_res must have the shape of x but for its last dimension, (5, 3, 3)"),
        ((x, h, h, x), "f_out must have the shape of (..., C) for x of (..., hc, C), (5, 4), got"),
    ):
        op_checks.assert_rejects(OP, args, message)
