"""fused_add_rms_norm against float64 truth, and against rms_norm of the sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

import liger_ops
import op_checks
import strategies
from op_table import OPS
from op_under_test import EVERY_FOLDER

OP, RMS_NORM = OPS["fused_add_rms_norm"], OPS["rms_norm"]


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.cases(OP))
def test_is_rms_norm_of_the_sum(folder: str, case: Any) -> None:
    """Bit for bit, in the same tile; the sum is PyTorch's."""
    tensors = OP.tensors(case)
    total = tensors["x"] + tensors["residual"]
    # The host code's own choice of tile may differ between the two ops.
    case = case if case.tile else replace(case, tile=(2, 2048))
    y, s = op_checks.run_kernel(OP, folder, False, case, OP.forward_args(case, tensors))
    args = RMS_NORM.forward_args(case, {**tensors, "x": total})
    (expected,) = op_checks.run_kernel(RMS_NORM, folder, False, case, args)
    assert torch.equal(s, total)
    assert torch.equal(y, expected)


def test_unused_outputs() -> None:
    """Without a gradient of y, or of the sum, the other's is the whole gradient."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    weight = torch.randn(8, requires_grad=True)
    y, s = liger_ops.fused_add_rms_norm(*tensors, weight)
    from_s = torch.autograd.grad(s.sum(), tensors, retain_graph=True)
    assert all(torch.equal(grad, torch.ones(3, 8)) for grad in from_s)
    from_y = torch.autograd.grad(y.square().sum(), [*tensors, weight])
    total = (tensors[0] + tensors[1]).detach().requires_grad_()
    other = weight.detach().clone().requires_grad_()
    expected = torch.autograd.grad(liger_ops.rms_norm(total, other).square().sum(), [total, other])
    torch.testing.assert_close(from_y, (expected[0], expected[0], expected[1]))


def test_residual_of_another_dtype() -> None:
    """A float32 residual stream with bfloat16 branches: the sum is float32, each gradient of its
    input's."""
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(3, 8, requires_grad=True)
    y, s = liger_ops.fused_add_rms_norm(x, residual, torch.randn(8))
    assert y.dtype is s.dtype is torch.float32
    assert torch.equal(s, x + residual)
    dx, dresidual = torch.autograd.grad(y.sum() + s.square().sum(), (x, residual))
    assert dx.dtype is torch.bfloat16
    assert torch.equal(dx, dresidual.bfloat16())
