"""The soft cap of kernels is exact for caps of any size, and its limits are the cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import library
from op_under_test import DEVICE, EVERY_FOLDER, INF, NAN

SIZES = torch.logspace(-4, 4, 81)
X = torch.cat([-SIZES, SIZES, torch.tensor([0.0, INF, -INF, NAN])]).to(DEVICE)
CAPS = (0.5, 50.0, 1e3, 1e6)
EPS = torch.finfo(torch.float32).eps


def lse_of(op: str, folder: str, *args: Tensor | int, **options: Any) -> tuple[Tensor, Any]:
    """Return the result lse of the forward op, and the arguments and results by their names."""
    forward = library.OPS[f"{op}_forward"]
    call = forward.arguments(*args, **options)
    results = forward.kernels[folder](*call)
    names = [result.name for result in forward.schema.returns]
    named = call._asdict() | dict(zip(names, results, strict=True))
    return named["lse"].flatten(), named


def assert_capped(found: Tensor, cap: float) -> None:
    exact = cap * torch.tanh(X.double() / cap)
    torch.testing.assert_close(found.double(), exact, rtol=4 * EPS, atol=0.0, equal_nan=True)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("op", ["cross_entropy", "log_prob"])
def test_the_soft_cap_of_losses(op: str, cap: float, folder: str) -> None:
    """lse of a row of one class is its capped logit, and its gradient the slope."""
    target = torch.zeros(len(X), dtype=torch.int64, device=DEVICE)
    lse, named = lse_of(op, folder, X.unsqueeze(1), target, softcap=cap)
    assert_capped(lse, cap)
    backward = library.OPS[f"{op}_backward"]
    named["dlse"] = torch.ones_like(named["lse"])
    names = [argument.name for argument in backward.schema.arguments]
    slope = backward.kernels[folder](*(named.get(name) for name in names)).squeeze(1)
    exact = 1 - torch.tanh(X.double() / cap).square()
    # The probability, exp(y - lse), has the rounding of y, of which a GPU may not round one of the
    # two before it subtracts.
    bound = 8 * EPS + EPS * exact * X.double().abs().clamp(max=cap)
    assert torch.equal(slope.isnan(), X.isnan())
    assert not ((slope.double() - exact).abs() > bound).any()


@pytest.mark.device_kernels
@pytest.mark.parametrize("cap", CAPS)
def test_the_soft_cap_of_attention(cap: float) -> None:
    """lse of a query that sees one key of ones is its capped score."""
    if DEVICE == "npu":
        pytest.skip("the kernel is for GPUs")
    ones = torch.ones(len(X), 1, 1, device=DEVICE)
    bounds = torch.arange(len(X) + 1, dtype=torch.int32, device=DEVICE)
    lse, _ = lse_of(
        "varlen_attention", "cuda", X.view(-1, 1, 1), ones, ones, bounds, 1,
        scale=1.0, softcap=cap, engine="triton",
    )  # fmt: skip
    assert_capped(lse, cap)
