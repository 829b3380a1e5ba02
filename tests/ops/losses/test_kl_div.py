"""The kernels of kl_div, jsd and tvd against float64 truth, and what is kl_div's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distribution_checks as checks
import liger_ops
import strategies
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, INF, NAN

OP = OPS["kl_div"]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("op", ("kl_div", "jsd", "tvd"))
def test_the_definitions_are_what_trainers_write(op: str) -> None:
    # Probabilities are above an eps of 0, with which kl_div is PyTorch's.
    cases = strategies.cases(OPS[op], eps=(0.0,), zeros=(False,))
    drawn = cases.filter(lambda case: 0 not in case.shape)
    strategies.for_cases(OPS[op], checks.assert_is_what_trainers_write, drawn=drawn)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ("batchmean", "mean", "sum", "none"))
@pytest.mark.parametrize("shape", ((3, 2, 5), (5,)))
def test_reductions_of_any_dimensions_are_torchs(reduction: str, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.rand(shape)
    theirs = torch.nn.functional.kl_div(x, y, reduction=reduction)
    torch.testing.assert_close(liger_ops.kl_div(x, y, reduction), theirs)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("log_target", (False, True))
def test_special_values(folder: str, log_target: bool) -> None:
    """0 where the target's probability is, inf where input's alone is, and NaN of NaN."""
    x = torch.tensor([[-1.0, -INF, -INF, NAN, -1.0, NAN, 0.0]], device=DEVICE)
    y = torch.tensor([[0.0, 0.0, 0.5, 0.0, NAN, 0.5, 1.0]], device=DEVICE)
    case = OP.case(
        shape=(1, 7), dtype=torch.float32, reduction="none", log_target=log_target, tile=(1, 16)
    )
    y = y.log() if log_target else y
    loss, dx, dy = checks.run(folder, case, x, y)
    expected = torch.tensor([[0.0, 0.0, INF, NAN, NAN, NAN, 0.0]], device=DEVICE)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(loss, liger_ops.kl_div(x, y, *OP.options(case)), equal_nan=True)
    p = y.exp() if log_target else y
    torch.testing.assert_close(dx, -p, equal_nan=True)
    assert dy[0, :3].tolist() == ([0.0, 0.0, INF] if log_target else [dy[0, 0], INF, INF])
    assert dy[0, 6] == 1 and bool(dy[0, 3:6].isnan().any())
    summed = replace(case, reduction="sum")
    assert checks.run(folder, summed, x[:, :3], y[:, :3])[0] == INF
    assert checks.run(folder, summed, x, y)[0].isnan()


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_the_least_logarithm_is_that_of_eps(folder: str) -> None:
    x, eps = torch.tensor([[-1.0, -2.0, -3.0]], device=DEVICE), 1e-2
    y = torch.tensor([[0.0, 1e-3, 0.5]], device=DEVICE)
    case = OP.case(shape=(1, 3), dtype=torch.float32, reduction="none", eps=eps)
    loss, dx, dy = checks.run(folder, case, x, y)
    log_y = torch.tensor([[eps, eps, 0.5]], device=DEVICE).log()
    torch.testing.assert_close(loss, y * (log_y - x))
    torch.testing.assert_close(loss, liger_ops.kl_div(x, y, *OP.options(case)))
    torch.testing.assert_close(dx, -y)
    own = torch.tensor([[0.0, 0.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(dy, log_y - x + own)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_negative_probability_gives_nan(folder: str) -> None:
    x, y = torch.zeros(2, 3, device=DEVICE), torch.full((2, 3), 0.5, device=DEVICE)
    y[1, 2] = -0.5
    case = OP.case(shape=(2, 3), dtype=torch.float32)
    assert checks.run(folder, case, x, y)[0].isnan() and liger_ops.kl_div(x, y).isnan()


@pytest.mark.parametrize("shape", ((0, 5), (2, 0), (0, 3, 5)))
@pytest.mark.parametrize("reduction", ("batchmean", "mean", "sum", "none"))
def test_no_terms_give_0_connected(shape: tuple[int, ...], reduction: str) -> None:
    x = torch.zeros(shape, requires_grad=True)
    for loss in (
        liger_ops.kl_div(x, torch.zeros(shape), reduction),
        liger_ops.tvd(x, torch.zeros(shape), None, reduction),
        liger_ops.jsd(x, torch.zeros(shape)),
    ):
        assert bool((loss == 0).all()) and loss.requires_grad
        loss.sum().backward()
