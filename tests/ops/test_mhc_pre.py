"""mhc_pre against float64 truth."""

from __future__ import annotations

import pytest
import torch

import kernel_tests
import mhc_strategies
import op_checks
from mhc_cases import MHCCase
from op_table import OPS

OP = OPS["mhc_pre"]
KERNELS = kernel_tests.every_folder(OP)
CASES = mhc_strategies.mhc()
WIDE = {
    # Several tiles by the host code's own plan, and more streams than models have.
    "wide": MHCCase(shape=(2, 4, 5001), dtype=torch.bfloat16, layout="sliced"),
    "17-streams": MHCCase(shape=(3, 17, 301), dtype=torch.float16),
    "64-streams": MHCCase(shape=(2, 64, 130), dtype=torch.float32),
}

test_forward_matches_truth = kernel_tests.forward_matches_truth(KERNELS, CASES)
test_backward_matches_truth = kernel_tests.backward_matches_truth(KERNELS, CASES)
test_properties = kernel_tests.properties(KERNELS, mhc_strategies.with_tokens())
test_cases_match_truth = kernel_tests.cases_match_truth(KERNELS, WIDE)


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
