"""Kernels read every input and write every output once; rows that do not fit are read twice."""

from __future__ import annotations

import pytest
import torch

from launch_cases import LaunchCase, counted
from op_under_test import FOLDERS
from traffic import traffic

# Rows of up to this many elements are read once by every kernel that is not in EXCEPTIONS.
READ_ONCE = 4096
EXCEPTIONS = {
    ("npu", "fused_add_rms_norm", False): "4096 elements take 91.8% of the Unified Buffer",
    ("npu", "group_norm", False): "flat tiles keep sums of channels as wide as themselves",
    ("npu", "group_norm", True): "flat tiles keep sums of channels as wide as themselves",
}
# Cost of two passes over a row above two reads, as a ratio: kernels that subtract a mean read the
# first tile of a row before the first pass, to sum squares about its mean.
FIRST_TILE = 0.14
# Single values per row, such as a statistic, may be read again, or be left to PyTorch.
ROUNDING = 0.01

CASES = {f"{few.op.id} {few.label}": few for _, few in counted()}


def reduced_together(case: LaunchCase) -> int:
    """The number of elements in a row, or in a group."""
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
