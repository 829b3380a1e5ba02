"""The ops behind TRL's functions: the same values and gradients, and the trainers use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops.integrations import trl as integration

pytest.importorskip("trl", reason="the functions are TRL's")
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

# More words than one of TRL's chunks has.
TOKENS, D, V, CHUNK = 37, 16, 101, 40


@pytest.fixture
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


def results(function: Any, inputs: list[Tensor], *options: Any) -> list[Tensor]:
    """The outputs that are computed, and the gradients of a sum of the differentiable ones."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    hidden, weight, targets, *bias = inputs
    outputs = function(hidden, weight, *(bias or [None]), targets, *options)
    outputs = [x for x in outputs if x is not None]
    loss = sum((x * torch.linspace(-1, 1, x.numel())).sum() for x in outputs if x.requires_grad)
    return [*outputs, *torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])]


def head(has_bias: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    targets = torch.randint(V, (TOKENS,), generator=generator)
    return [draw(TOKENS, D), draw(V, D), targets, *([draw(V)] if has_bias else [])]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ((1.0, CHUNK), ("log_probs",)),
        ((0.7, CHUNK), ("log_probs", "entropy")),
        ((1.3, CHUNK, 5.0, 0.5), ("log_probs", "entropy", "is_top1")),
        ((0.7, CHUNK, None, 0.5), ("log_probs", "mean_logits")),
        ((0.7, CHUNK, 5.0, 0.5), ("log_probs", "log_sum_sq_probs")),
        ((0.7, CHUNK, 5.0, 0.5), integration.ALL_OUTPUTS),
    ],
)
def test_same_as_trl(has_bias: bool, options: Any, outputs: Any, installed: None) -> None:
    options = (*options, *(None, 1.0)[len(options) - 2 :], outputs)
    expected = results(ChunkedLogProbFunction.apply, head(has_bias), *options)
    found = results(getattr(utils, integration.CHUNKED).apply, head(has_bias), *options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_trl_serves_the_rest(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit_scale that `linear_log_prob` refuses."""
    monkeypatch.setattr(integration, "linear_log_prob_forward", None)
    options = (1.0, CHUNK, None, 0.0, ("log_probs",))
    found = results(getattr(utils, integration.CHUNKED).apply, head(), *options)
    expected = results(ChunkedLogProbFunction.apply, head(), *options)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_head_of_another_dtype(installed: None) -> None:
    """It is TRL's without autocast; under autocast both compute in its dtype."""
    hidden, weight, targets = head()
    options = (1.0, CHUNK, None, 1.0, ("log_probs", "entropy"))
    ours = getattr(utils, integration.CHUNKED)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            inputs = [hidden, weight.bfloat16(), targets]
            found = results(ours.apply, inputs, *options)
            expected = results(ChunkedLogProbFunction.apply, inputs, *options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_from_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, V, generator=generator)
    index = torch.randint(V, (3, 5), generator=generator)
    kept = torch.arange(15).view(3, 5) % 4
    found = integration.fused_log_prob(logits, index, 0.7, kept)
    log_p = torch.log_softmax(logits / 0.7, -1)
    picked = log_p.gather(-1, index[..., None])[..., 0]
    expected = picked, -(log_p.exp() * log_p).sum(-1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.masked_fill(kept == 0, 0.0))


def test_installed_once_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = vars(utils).copy()
    integration.uninstall()
    integration.install()
    integration.install()
    changed = {name for name in before if vars(utils)[name] is not before[name]}
    assert integration.CHUNKED in changed <= {integration.CHUNKED, integration.FUSED}
    integration.uninstall()
    assert all(vars(utils)[name] is before[name] for name in before)
    monkeypatch.delattr(utils, integration.CHUNKED)
    with pytest.raises(RuntimeError, match="this version does not"):
        integration.install()


def test_compiled_in_one_graph(installed: None) -> None:
    options = (0.7, CHUNK)
    ours = getattr(utils, integration.CHUNKED).apply
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = results(ours, head(), *options)
    for one, other in zip(results(compiled, head(), *options), expected, strict=True):
        torch.testing.assert_close(one, other)
