"""`explain` tells what is gained: bytes that are not saved, and with `measure=True` measured steps.

Compilations are replaced by functions whose time is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_ops
from rewriting import values


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)), torch.arange(len(x)))


def attention(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """Two rewrites: causal attention, and a head with its loss."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    return F.cross_entropy(y[0] @ weight.T, torch.arange(4))


class Compiled:
    """Stands for torch.compile: notes the options, and is slow without one of the rewrites."""

    def __init__(self, slow_without: str = "", fails: str = "") -> None:
        self.original, self.slow_without, self.fails = torch.compile, slow_without, fails
        self.options: list[dict[str, Any]] = []

    def __call__(self, model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if callable(options.get("backend")):
            return self.original(model, **options)
        self.options.append(options)
        if options.get("backend") == self.fails:
            raise RuntimeError("no compiler here")
        names = options.get("options", {}).get("rewrites", [self.slow_without])

        def run(*args: Any) -> Any:
            time.sleep(0.05 * (self.slow_without not in names))
            return model(*args)

        return run


def test_bytes_that_are_not_saved_are_told() -> None:
    gate, up = values(4, 8), values(4, 8, seed=1)
    explanation = liger_ops.explain(lambda gate, up: F.silu(gate) * up, gate, up)
    assert explanation.saved_bytes == (4 * 8 * 4, 0)
    assert "saved for the backward of this batch: " in str(explanation)
    assert explanation.gain is None


def test_each_step_and_each_rewrite_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(slow_without="causal_attention")
    monkeypatch.setattr(torch, "compile", compiled)
    inputs = [values(1, 4, 8), values(1, 4, 8, seed=1), values(16, 8)]
    gain = liger_ops.explain(attention, *inputs, measure=True).gain
    assert gain is not None
    assert [step.name for step in gain.steps] == ["eager", "torch.compile", "backend='liger'"]
    for step in gain.steps:
        assert step.spread[0] <= step.milliseconds <= step.spread[1] and step.peak_bytes > 0
        assert not step.error
    left_out = [options["options"]["rewrites"] for options in compiled.options[2:]]
    assert len(left_out) == 2 and "causal_attention" in left_out[0] + left_out[1]
    (matters,) = (step for step in gain.rewrites if step.milliseconds > 25)
    assert matters.name == "  without causal_attention"
    assert "without causal_attention" in str(gain) and "peak" in str(gain)
    assert all(x.grad is None for x in inputs)


def test_a_fused_model_is_measured_with_and_without_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", Compiled())
    model = Head()
    liger_ops.fuse(model)
    gain = liger_ops.explain(model, values(4, 8), measure=True).gain
    names = [
        f"{form}, {way}" for form in ("unfused", "fused") for way in ("eager", "torch.compile")
    ]
    assert gain is not None and [step.name for step in gain.steps] == names
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", Compiled(fails="liger"))
    text = str(liger_ops.explain(Head(), values(4, 8), measure=True))
    assert "backend='liger'" in text and "fails: RuntimeError: no compiler here" in text


def test_measure_is_a_bool() -> None:
    with pytest.raises(TypeError, match="explain: measure must be a bool, got str"):
        liger_ops.explain(Head(), values(4, 8), measure="yes")
