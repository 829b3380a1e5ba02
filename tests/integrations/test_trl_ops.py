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
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer import distillation_trainer, utils

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


def both_heads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states, weight and bias of the student, and of the teacher."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, D), (V, D), (V,), (TOKENS, 9), (V, 9), (V,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def divergences(function: Any, inputs: list[Tensor | None], *options: Any) -> list[Tensor]:
    """The divergence, the entropy, and the gradients of the student, where all require one."""
    inputs = [None if x is None else x.clone().requires_grad_() for x in inputs]
    divergence, entropy = function(*inputs, *options)
    assert divergence.requires_grad and not entropy.requires_grad
    loss = (divergence * torch.linspace(-1, 1, len(divergence))).sum()
    student = [x for x in inputs[:3] if x is not None]
    return [divergence, entropy, *torch.autograd.grad(loss, student)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        (0.0,),
        (1.0, 0.7),
        (0.5, 1.3),
        (0.1, 0.9, 0.5, 5.0, 1.5, 4.0),
        (0.0, 0.7, 2.0, None, 1.0, 3.0),
    ],
)
def test_divergence_is_trls(has_bias: bool, options: Any, installed: None) -> None:
    inputs = [x if has_bias or x.dim() == 2 else None for x in both_heads()]
    ours = getattr(distillation_trainer, integration.DIVERGENCE)
    assert ours is not ChunkedDivergenceFunction
    expected = divergences(ChunkedDivergenceFunction.apply, inputs, *options)
    for one, other in zip(divergences(ours.apply, inputs, *options), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_divergence_under_autocast(installed: None) -> None:
    ours = getattr(distillation_trainer, integration.DIVERGENCE)
    with torch.autocast("cpu", torch.bfloat16):
        expected = divergences(ChunkedDivergenceFunction.apply, both_heads(), 0.5)
        found = divergences(ours.apply, both_heads(), 0.5)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("case", ["dtype", "scale", "partitioned"])
def test_trl_serves_other_divergences(
    case: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL computes what `linear_divergence` refuses, and weights that ZeRO-3 partitions."""
    monkeypatch.setattr(integration, "linear_divergence_forward", None)
    inputs, options = both_heads(), (0.5, 1.0, 0.0 if case == "scale" else 1.0)
    if case == "dtype":
        inputs[4] = inputs[4].bfloat16()
    if case == "partitioned":
        inputs[1].ds_id = 0
    ours, results = getattr(distillation_trainer, integration.DIVERGENCE), []
    for function in (ours, ChunkedDivergenceFunction):
        inputs[0] = inputs[0].detach().requires_grad_()
        divergence, entropy = function.apply(*inputs, *options)
        results.append([divergence, entropy, *torch.autograd.grad(divergence.sum(), inputs[0])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


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


@pytest.mark.parametrize(
    "module, names",
    [
        (utils, (integration.CHUNKED, integration.FUSED)),
        (distillation_trainer, (integration.DIVERGENCE,)),
    ],
)
def test_installed_once_and_undone(
    module: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vars(module).copy()
    integration.uninstall()
    integration.install()
    integration.install()
    changed = {name for name in before if vars(module)[name] is not before[name]}
    assert names[0] in changed <= set(names)
    integration.uninstall()
    assert all(vars(module)[name] is before[name] for name in before)
    monkeypatch.delattr(module, names[0])
    with pytest.raises(RuntimeError, match=f"{module.__name__} must have {names[0]}.*does not"):
        integration.install()
    assert not integration._replaced


def test_compiled_in_one_graph(installed: None) -> None:
    options = (0.7, CHUNK)
    ours = getattr(utils, integration.CHUNKED).apply
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = results(ours, head(), *options)
    for one, other in zip(results(compiled, head(), *options), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_divergence_compiled_in_one_graph(installed: None) -> None:
    ours = getattr(distillation_trainer, integration.DIVERGENCE).apply
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = divergences(ours, both_heads(), 0.3, 0.7)
    for one, other in zip(divergences(compiled, both_heads(), 0.3, 0.7), expected, strict=True):
        torch.testing.assert_close(one, other)
