"""mhc_post_res against float64 truth."""

from __future__ import annotations

import torch

import kernel_tests
import mhc_strategies
import op_checks
from mhc_cases import MHCCase
from op_table import OPS

OP = OPS["mhc_post_res"]
KERNELS = kernel_tests.every_folder(OP)
CASES = mhc_strategies.mhc()
WIDE = {
    # Several tiles by the host code's own plan, and more streams than models have.
    "wide": MHCCase(shape=(2, 4, 3001), dtype=torch.bfloat16, layout="sliced"),
    "17-streams": MHCCase(shape=(2, 17, 301), dtype=torch.float16),
}

test_forward_matches_truth = kernel_tests.forward_matches_truth(KERNELS, CASES)
test_backward_matches_truth = kernel_tests.backward_matches_truth(KERNELS, CASES)
test_properties = kernel_tests.properties(KERNELS, mhc_strategies.with_tokens())
test_cases_match_truth = kernel_tests.cases_match_truth(KERNELS, WIDE)


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
