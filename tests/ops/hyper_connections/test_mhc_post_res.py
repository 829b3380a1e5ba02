"""mhc_post_res against float64 truth."""

from __future__ import annotations

import torch

import op_checks
from op_table import OPS

OP = OPS["mhc_post_res"]


def test_shapes() -> None:
    x, f_out, h = torch.randn(5, 3, 4), torch.randn(5, 4), torch.randn(5, 3)
    op_checks.assert_rejects(
        OP, (x, f_out, h, torch.randn(5, 3)),
        "mhc_post_res: h_res must have the shape of x but for its last dimension, (5, 3, 3), got"
        " (5, 3)",
    )  # fmt: skip
    op_checks.assert_rejects(
        OP, (x, h, h, torch.randn(5, 3, 3)),
        "mhc_post_res: f_out must have the shape of (..., C) for x of (..., hc, C), (5, 4), got"
        " (5, 3)",
    )  # fmt: skip
