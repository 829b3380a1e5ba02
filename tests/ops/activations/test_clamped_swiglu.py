"""clamped_swiglu at its limit."""

from __future__ import annotations

import pytest
import torch

from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_on_the_limit_the_gradient_is_the_insides(folder: str) -> None:
    limit = 7.0
    gate = torch.tensor([limit, 1.0, 1.0, 7.5, 1.0]).to(DEVICE)
    up = torch.tensor([1.0, limit, -limit, 1.0, -7.5]).to(DEVICE)
    kernel = OPS["clamped_swiglu"].kernel(folder, backward=True)
    dy = torch.ones_like(gate)
    dgate, dup = kernel(dy, gate, up, 1.702, limit, 1.0, False, [True, True])
    assert (dgate != 0).tolist() == [True, True, True, False, True]
    assert (dup != 0).tolist() == [True, True, True, True, False]
