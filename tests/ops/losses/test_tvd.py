"""Properties of tvd alone; test_kl_div.py compares its kernels with float64 truth."""

from __future__ import annotations

import pytest
import torch

import distribution_checks as checks
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["tvd"]


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_ignored_rows_are_not_seen(folder: str, reduction: str) -> None:
    checks.assert_ignored_rows_are_not_seen(folder, "tvd", reduction)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_equal_probabilities_have_no_gradient(folder: str) -> None:
    """And NaN is seen."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.5, float("nan"), 0.5]], device=DEVICE)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], device=DEVICE)
    case = OP.case(shape=(2, 3), dtype=torch.float32, reduction="none")
    loss, dp, dq = checks.run(folder, case, p, q, None)
    torch.testing.assert_close(loss, (p - q).abs() / 2, equal_nan=True)
    assert dp[0].tolist() == [0.0, -0.5, 0.5] and dq[0].tolist() == [0.0, 0.5, -0.5]
