"""`explain(verify=True)` measures what the rewrites change, and detects a wrong rewrite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import liger_ops
from liger_ops import rewrites as passes
from liger_ops.rewrites.engine import casts
from liger_ops.rewrites.engine.report import Report
from rewriting import values

pytestmark = pytest.mark.usefixtures("empty_caches")


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(16, eps=1e-6, dtype=dtype)
        self.gate, self.up = (nn.Linear(16, 24, dtype=dtype) for _ in range(2))
        self.dropout = dropout

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        x = F.dropout(self.norm(x), self.dropout)
        gate = self.gate(x)
        if broken:
            torch._dynamo.graph_break()
        return (F.silu(gate) * self.up(x)).float().square().mean()


def other_activation(graph: fx.Graph, report: Report) -> None:
    for node in graph.nodes:
        if node.target is F.silu:
            node.target = F.gelu


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_right_agrees(dtype, broken):
    model, x = Model(dtype), values(64, 16, dtype=dtype)
    found = liger_ops.explain(model, x, verify=True, broken=broken)
    verification = found.verification
    assert verification is not None and verification.agrees
    assert verification.truth is torch.float64
    names = {one.name for one in verification.differences}
    assert names == {"loss", "argument 0", *(name for name, _ in model.named_parameters())}
    own = max(one.own_error for one in verification.differences)
    assert 0 < own < 4 * torch.finfo(dtype).eps
    assert all(parameter.grad is None for parameter in [x, *model.parameters()])
    assert "agree" in str(found) and "float64" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_wrong_does_not(dtype, monkeypatch):
    monkeypatch.setitem(passes.REWRITES, "swiglu", other_activation)
    model, x = Model(dtype), values(64, 16, dtype=dtype)
    verification = liger_ops.explain(lambda x: model(x), x, verify=True).verification
    assert verification is not None and not verification.agrees
    wrong = {one.name for one in verification.differences if not one.agrees}
    assert {"gate.weight", "up.weight"} <= wrong
    assert "DO NOT AGREE" in str(verification) and "gate.weight" in str(verification)


class FakeQuantised(nn.Module):
    """A norm whose product rounds x to a narrow dtype, and whose statistic does not."""

    def __init__(self, narrow: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.narrow = nn.Parameter(values(16, dtype=dtype).detach()), narrow

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.narrow).to(x.dtype).float()
        y = h * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("by_fuse", [False, True])
@pytest.mark.parametrize(
    ("narrow", "dtype"),
    [
        (torch.float8_e4m3fn, torch.float32), (torch.bfloat16, torch.float32),
        (torch.int8, torch.float32), (torch.float8_e5m2, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_a_lost_cast_does_not_agree(narrow, dtype, by_fuse, monkeypatch):
    """Found if it is kept, and shown if a rewrite takes every cast for nothing."""
    model, x = FakeQuantised(narrow, dtype), values(64, 16, dtype=dtype)
    found = liger_ops.explain(model, x, verify=True)
    assert found.verification.agrees and not any(one.used for one in found.findings)
    assert any(f"rounded to {narrow}" in str(one.reason) for one in found.findings)
    monkeypatch.setattr(casts, "represents", lambda dtype, source: True)
    assert bool(liger_ops.fuse(model)) if by_fuse else True
    found = liger_ops.explain(model, x, verify=True)
    assert not found.verification.agrees, found


def test_random_numbers_leave_no_truth():
    model, x = Model(torch.float32, dropout=0.5), values(64, 16)
    random = torch.get_rng_state()
    verification = liger_ops.explain(model, x, verify=True).verification
    assert verification is not None and verification.agrees and verification.truth is None
    assert "random" in str(verification)
    assert torch.equal(random, torch.get_rng_state())


def test_bad_arguments():
    with pytest.raises(TypeError, match="explain: verify must be a bool, got int"):
        liger_ops.explain(Model(torch.float32), values(4, 16), verify=1)
    with pytest.raises(ValueError, match="verify needs an output with a gradient"):
        liger_ops.explain(lambda x: x.sum(), torch.ones(3), verify=True)
