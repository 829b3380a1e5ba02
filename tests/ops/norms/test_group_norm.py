"""group_norm against float64 truth, and against torch.nn.functional.group_norm."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from op_table import OPS

OP = OPS["group_norm"]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((3, 24), (2, 24, 5), (2, 24, 5, 7), (1, 24, 2, 3, 4)))
@pytest.mark.parametrize("affine", (False, True))
def test_agrees_with_aten(dtype: torch.dtype, shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(24, dtype=dtype, requires_grad=True) if affine else None
    bias = torch.randn(24, dtype=dtype, requires_grad=True) if affine else None
    dy = torch.randn(shape, dtype=dtype)
    ours = liger_ops.group_norm(x, 3, weight, bias, 1e-5)
    theirs = torch.nn.functional.group_norm(x, 3, weight, bias, 1e-5)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, theirs)
    given_tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    # ATen rounds inside its half-precision backward, by a few units in the last place of the
    # largest gradient.
    bounds = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(
        torch.autograd.grad(ours, given_tensors, dy),
        torch.autograd.grad(theirs, given_tensors, dy),
        **bounds,
    )


def test_channels_last() -> None:
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    y = liger_ops.group_norm(x, 3)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 3))
