"""Kernels read every input and write every output once, or where a row does not fit, read twice."""

from __future__ import annotations

import pytest
import torch

from launch_cases import LaunchCase, counted
from op_under_test import FOLDERS
from traffic import traffic

# The elements of a row that every kernel but these reads once.
READ_ONCE = 4096
EXCEPTIONS = {
    ("npu", "fused_add_rms_norm", False): "4096 elements take 91.8% of the Unified Buffer",
    ("npu", "group_norm", False): "flat tiles keep sums of channels as wide as themselves",
    ("npu", "group_norm", True): "flat tiles keep sums of channels as wide as themselves",
}
# What two passes over a row may cost beyond two reads, in turns: kernels that subtract a mean read
# the first tile of a row before the first pass, for sums of squares about its mean.
FIRST_TILE = 0.14
# What a row has one of, such as a statistic, may be read again, or be left to PyTorch.
ROUNDING = 0.01

CASES = {f"{few.op.id} {few.label}": few for _, few in counted()}


def reduced_together(case: LaunchCase) -> int:
    """The elements of a row, or of a group."""
    return torch.Size(case.case.shape[1:]).numel() // getattr(case.case, "num_groups", 1)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("label", CASES)
def test_traffic_is_the_least(label, folder, backward):
    case = CASES[label]
    found = traffic(case.op, folder, backward, case.case)
    assert found.ratio > 1 - ROUNDING, "an input is not read, or an output not written"
    one_pass = case.op.elementwise or reduced_together(case) <= READ_ONCE
    if one_pass and (folder, case.op.name, backward) not in EXCEPTIONS:
        assert found.ratio == pytest.approx(1, abs=ROUNDING)
    elif folder == "npu":
        assert found.ratio <= found.two_passes + ROUNDING
    else:
        assert found.ratio <= found.two_passes + FIRST_TILE
