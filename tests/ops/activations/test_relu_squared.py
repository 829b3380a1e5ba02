"""relu_squared against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

import liger_ops
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_is_the_models_code(dtype: torch.dtype) -> None:
    """Bitwise equal: of the two operations only the square rounds."""
    torch.manual_seed(0)
    x = torch.randn(5, 33).to(dtype)
    assert torch.equal(liger_ops.relu_squared(x), ACT2FN["relu2"](x))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    liger_ops.relu_squared(ours).sum().backward()
    ACT2FN["relu2"](theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_any_shape(folder: str) -> None:
    for shape in ((), (1,), (0, 5), (5, 0), (2, 3, 1, 5, 1)):
        x = torch.randn(shape).to(DEVICE)
        forward = OPS["relu_squared"].kernel(folder)
        backward = OPS["relu_squared"].kernel(folder, backward=True)
        assert torch.equal(forward(x), x.relu().square())
        torch.testing.assert_close(backward(x, x), 2 * x.relu() * x)
