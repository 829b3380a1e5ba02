"""dyt at every scale, and its module."""

from __future__ import annotations

import pytest
import torch

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["dyt"]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_tanh_and_its_slope_at_every_scale(folder: str) -> None:
    """The relative error is a few float32 roundings where tanh is linear, curved and flat; the
    slope has no cancellation where tanh is nearly 1."""
    x = torch.logspace(-30, 1.6, 1000, dtype=torch.float64).float()
    x = torch.cat((-x, torch.linspace(-0.7, 0.7, 1000), x, torch.tensor([0.0])))[None].to(DEVICE)
    alpha, gamma = x.new_ones(()), x.new_ones(x.shape[-1])
    (y,) = op_checks.as_tuple(OP.kernel(folder)(x, alpha, gamma, None))
    truth = torch.tanh(x.double())
    assert y is not None
    assert ((y - truth).abs() <= 4 * 2**-23 * truth.abs()).all()
    mask = [True, False, False, False]
    dx, *_ = OP.kernel(folder, backward=True)(x.new_ones(x.shape), x, alpha, gamma, None, mask)
    slope = 1 / torch.cosh(x.double()).square()
    # exp(2 * x) multiplies the rounding error of its exponent.
    assert ((dx - slope).abs() <= (8 + 4 * x.abs()) * 2**-23 * slope).all()


@pytest.mark.device_kernels
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@EVERY_FOLDER
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities(folder: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, 50.0]]).to(DEVICE, dtype)
    alpha, gamma = x.new_full((1,), 2.0), x.new_ones(7)
    y = OP.kernel(folder)(x, alpha, gamma, gamma)
    torch.testing.assert_close(y, torch.tanh(2 * x) + 1, equal_nan=True)
    mask = [True, False, False, False]
    dx, *_ = OP.kernel(folder, backward=True)(x, x, alpha, gamma, gamma, mask)
    assert dx.isnan().tolist() == [[True, True, True, False, False, False, False]]


def test_initial_values() -> None:
    module, x = liger_ops.nn.DyT(8, init_alpha=0.8, dtype=torch.float64), torch.randn(3, 8).double()
    assert torch.equal(module(x), torch.tanh(0.8 * x))
    assert repr(module) == "DyT(8, beta=True, init_alpha=0.8)"
    assert liger_ops.nn.DyT(8, beta=False).beta is None
