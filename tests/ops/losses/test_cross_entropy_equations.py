"""cross_entropy against torch.nn.functional's, and its other options against their equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import liger_ops


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1, 1.0))
@pytest.mark.parametrize("has_weight", (False, True))
@pytest.mark.parametrize("ignored", ("none", "some", "all"))
def test_agrees_with_torch(
    dtype: torch.dtype, reduction: str, label_smoothing: float, has_weight: bool, ignored: str
) -> None:
    """With all of PyTorch's options, including the gradients if every target is ignored."""
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(7, 33, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, 33, (7,), generator=generator)
    target[{"none": slice(0), "some": slice(2, 5), "all": slice(7)}[ignored]] = 3
    ignore_index = -100 if ignored == "none" else 3
    weight = torch.rand(33, generator=generator).to(dtype) if has_weight else None
    kwargs: dict[str, Any] = {
        "weight": weight, "ignore_index": ignore_index, "reduction": reduction,
        "label_smoothing": label_smoothing,
    }  # fmt: skip
    ours, theirs = (
        liger_ops.cross_entropy(x, target, **kwargs),
        F.cross_entropy(x, target, **kwargs),
    )
    assert ours.dtype is dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    upstream = torch.randn(ours.shape, generator=generator, dtype=dtype)
    ours_dx, theirs_dx = (torch.autograd.grad(loss, x, upstream)[0] for loss in (ours, theirs))
    torch.testing.assert_close(ours_dx, theirs_dx)
    if ignored == "all":
        assert ours.isnan().all() if reduction == "mean" else (ours == 0).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_the_loss_is_float32(dtype: torch.dtype) -> None:
    """As under autocast, where PyTorch first casts the logits; autocast changes nothing here."""
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target = torch.arange(5)
    expected = F.cross_entropy(x.float(), target)
    (expected_dx,) = torch.autograd.grad(expected, x)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = liger_ops.cross_entropy(x, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], expected_dx)


def test_the_other_options_are_their_equations() -> None:
    """The z-loss, weighted and differentiated by itself; token weights; the mean's divisor; softcap
    and scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.rand(11, generator=generator, dtype=torch.float64)
    token_weight = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    target = torch.tensor([[1, -100, 3], [10, 0, 5]])
    items = torch.tensor(4)
    kept = target != -100
    y = 3 * torch.tanh(0.5 * x / 3)
    counts = (token_weight * weight[target.clamp(min=0)])[kept]
    z_loss = (counts * 0.1 * y.logsumexp(-1)[kept].square()).sum() / 4
    nll = F.cross_entropy(y[kept], target[kept], weight, reduction="none")
    loss = (token_weight[kept] * nll).sum() / 4 + z_loss
    outputs = liger_ops.cross_entropy_forward(
        x, target, weight, token_weight, items, lse_square_scale=0.1, softcap=3.0, logit_scale=0.5,
    )  # fmt: skip
    torch.testing.assert_close(outputs[0], loss)
    torch.testing.assert_close(outputs[1], z_loss)
    torch.testing.assert_close(outputs[2], y.logsumexp(-1))
    torch.testing.assert_close(outputs[4], counts.sum())
    for ours, theirs in ((outputs[0], loss), (outputs[1], z_loss)):
        grads = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*grads)
    options = (weight, token_weight, None, -100, "mean", 0.0, 0.1, 3.0, 0.5)
    mean = liger_ops.cross_entropy(x, target, *options)
    torch.testing.assert_close(mean, loss * 4 / counts.sum())
