"""layer_norm against float64 truth, and against torch.nn.functional.layer_norm."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from op_table import OPS

OP = OPS["layer_norm"]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("has_weight", (False, True))
@pytest.mark.parametrize("has_bias", (False, True))
def test_agrees_with_aten(dtype: torch.dtype, has_weight: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 33, dtype=dtype, requires_grad=True)
    weight = torch.randn(33, dtype=dtype, requires_grad=True) if has_weight else None
    bias = torch.randn(33, dtype=dtype, requires_grad=True) if has_bias else None
    dy = torch.randn(3, 5, 33, dtype=dtype)
    ours = liger_ops.layer_norm(x, weight, bias, 1e-5)
    theirs = torch.nn.functional.layer_norm(x, (33,), weight, bias, 1e-5)
    torch.testing.assert_close(ours, theirs)
    given_tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    # ATen rounds inside its half-precision backward, by a few units in the last place of the
    # largest gradient.
    bounds = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(
        torch.autograd.grad(ours, given_tensors, dy),
        torch.autograd.grad(theirs, given_tensors, dy),
        **bounds,
    )
