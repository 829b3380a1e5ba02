"""relu_squared of any shape."""

from __future__ import annotations

import pytest
import torch

from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_any_shape(folder: str) -> None:
    for shape in ((), (1,), (0, 5), (5, 0), (2, 3, 1, 5, 1)):
        x = torch.randn(shape).to(DEVICE)
        forward = OPS["relu_squared"].kernel(folder)
        backward = OPS["relu_squared"].kernel(folder, backward=True)
        assert torch.equal(forward(x), x.relu().square())
        torch.testing.assert_close(backward(x, x), 2 * x.relu() * x)
