"""Properties of jsd alone; test_kl_div.py compares its kernels with float64 truth."""

from __future__ import annotations

import pytest
import torch

import distribution_checks as checks
import liger_ops
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, INF, NAN

LOG_2 = 0.6931472
OP = OPS["jsd"]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_ignored_rows_are_not_seen(folder: str) -> None:
    checks.assert_ignored_rows_are_not_seen(folder, "jsd", "batchmean")


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("beta", (0.5, 0.0, 1.0))
def test_classes_of_probability_zero(folder: str, beta: float) -> None:
    """Disjoint rows have a divergence of log 2, and finite gradients; the limits are inf."""
    x = torch.tensor([[0.0, -INF, -INF]], device=DEVICE)
    y = torch.tensor([[-INF, 0.0, -INF]], device=DEVICE)
    case = OP.case(shape=(1, 3), dtype=torch.float32, beta=beta, tile=(1, 16))
    loss, dx, dy = checks.run(folder, case, x, y, None)
    if beta == 0.5:
        assert loss.item() == pytest.approx(LOG_2)
        assert dx[0].tolist() == pytest.approx([LOG_2 / 2, 0, 0])
        assert dy[0].tolist() == pytest.approx([0, LOG_2 / 2, 0])
    else:
        assert loss == INF
        finite, infinite = (dx, dy) if beta == 0 else (dy, dx)
        assert finite[0].tolist() == ([0, -1, 0] if beta == 0 else [-1, 0, 0])
        assert infinite[0].tolist() == ([0, INF, 0] if beta == 0 else [INF, 0, 0])
    assert liger_ops.jsd(x, y, beta=beta).item() == pytest.approx(loss.item())


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("beta", (0.5, 0.0, 1.0))
@pytest.mark.parametrize("second", (False, True))
def test_nan_is_seen(folder: str, beta: float, second: bool) -> None:
    """Also at a class of probability 0 in the other."""
    rows = [torch.tensor([[0.0, -INF]], device=DEVICE), torch.tensor([[0.0, NAN]], device=DEVICE)]
    case = OP.case(shape=(1, 2), dtype=torch.float32, beta=beta)
    given = rows if second else rows[::-1]
    assert checks.run(folder, case, *given, None)[0].isnan()
    assert liger_ops.jsd(*given, beta=beta).isnan()
