"""sparsemax against float64 truth, and against the conditions that define the projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["sparsemax_forward"]


def assert_projects(x: Tensor, y: Tensor, dim: int, roundings: float) -> None:
    """The conditions for the point of the simplex that is nearest to x: y is on it; x - y is the
    same, tau, where y is above 0; and x is at most tau where y is 0."""
    x, y = x.double(), y.double()
    assert (y >= 0).all()
    eps = roundings * 2**-23
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)), rtol=0, atol=eps)
    support = y > 0
    tau = ((x - y) * support).sum(dim, keepdim=True) / support.sum(dim, keepdim=True)
    assert (((x - y - tau).abs() <= eps * (1 + x.abs())) | ~support).all()
    assert ((x <= tau + eps * (1 + x.abs())) | support).all()


@pytest.mark.parametrize("dim", (-1, 0, 1, -2))
@pytest.mark.parametrize("scale", (0.01, 1.0, 30.0))
def test_the_definition_is_the_projection(dim: int, scale: float) -> None:
    x = scale * torch.randn(7, 300, 5, generator=torch.Generator().manual_seed(0))
    assert_projects(x, liger_ops.sparsemax(x, dim), dim, 8)
    wide = x.double()
    assert_projects(wide, liger_ops.sparsemax(wide, dim), dim, 1e-8)


def slow_row() -> Tensor:
    """A row of 10 elements for which Newton's iteration drops one element with every step."""
    row, tau, distance = [0.0, -0.5], -0.75, 1e-6
    for k in range(3, 11):
        row.append(tau - distance)
        # The threshold of the step after: it must lie between this element and the one before.
        tau -= distance / k
        distance *= 1.05 * (k * k - 1) / k
    return torch.tensor(row)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (4, 32), (1, 16)))
def test_slow_and_tied_rows(folder: str, tile: tuple[int, int] | None) -> None:
    slow = slow_row()
    tied = -torch.linspace(0, 1.2, 5).square().repeat(2)
    x = torch.stack((slow, 1e4 + slow, tied, torch.full((10,), -7.5)))
    case = OP.case(shape=tuple(x.shape), dtype=torch.float32, tile=tile)
    (y,) = op_checks.run_kernel(OP, folder, False, case, (x.to(DEVICE),))
    assert y is not None
    assert_projects(x, y.cpu(), -1, 8)
    torch.testing.assert_close(y[3].cpu(), torch.full((10,), 0.1), rtol=4e-7, atol=0)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_wide_flat_row_sums_to_one(folder: str) -> None:
    """The first steps add up 30000 elements; the last corrects what they have rounded."""
    case = OP.case(shape=(1, 30000), dtype=torch.float32)
    x = 1e-6 * torch.randn(1, 30000, generator=torch.Generator().manual_seed(0))
    for tile in (None, (1, 1024)):
        (y,) = op_checks.run_kernel(OP, folder, False, replace(case, tile=tile), (x.to(DEVICE),))
        assert y is not None and abs(float(y.double().sum()) - 1) < 4e-7


@pytest.mark.device_kernels
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 64), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """As softmax: -inf gives 0; rows of only -inf, or with inf or NaN, are NaN, and so is dx."""
    inf = torch.inf
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -inf
    x[4, 5], x[5, 39] = inf, torch.nan
    x[6, :39] = torch.finfo(dtype).min
    case = OP.case(shape=(7, 40), dtype=dtype, tile=tile)
    (y,) = op_checks.run_kernel(OP, folder, False, case, (x.to(DEVICE),))
    assert y is not None
    torch.testing.assert_close(y.cpu(), OP.definition(x), equal_nan=True)
    assert y.isnan().all(-1).nonzero().flatten().tolist() == [3, 4, 5]
    assert not y[[0, 1, 2, 6]].isnan().any() and (y[0, :33] == 0).all() and y[2, 0] == 1
    (dx,) = op_checks.run_kernel(OP, folder, True, case, (torch.ones_like(y), y))
    assert dx is not None and torch.equal(dx.isnan(), y.isnan())


def test_an_element_alone_in_the_support_has_no_gradient() -> None:
    """y is 1 there and 0 elsewhere, also where x is tau exactly: by the formula and by PyTorch's
    derivative of the definition."""
    x = torch.tensor([[5.0, 0.0, 4.0], [-3.0, 2.0, 1.0]])
    weights = torch.tensor([1.0, 3.0, -2.0])

    def loss(x: Tensor) -> Tensor:
        return (liger_ops.sparsemax(x) * weights).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 3))
    assert torch.equal(torch.func.grad(loss)(x), torch.zeros(2, 3))


@pytest.mark.parametrize("dim", (-1, 2, 0, -2))
def test_module_is_the_op_along_a_dimension(dim: int) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    module = liger_ops.nn.Sparsemax(dim)
    assert repr(module) == f"Sparsemax(dim={dim})"
    y = module(x)
    assert y.shape == x.shape and torch.equal(y, liger_ops.sparsemax(x, dim))
    assert torch.equal(y, liger_ops.sparsemax(x.movedim(dim, -1)).movedim(-1, dim))
    assert torch.autograd.gradcheck(module, (x,))
