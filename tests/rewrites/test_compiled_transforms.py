"""Code that transforms code, in what the `liger` backend compiles: the same results as without it.

Each program has a norm before and after, which is replaced, so that the rewrites are at work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from compiled_models import aot_eager, compiled
from rewriting import values

Program = Callable[[Tensor], Tensor]


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def gated(x: Tensor) -> Tensor:
    return F.silu(x) * (x + 1.0)


def vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: normed(row) * row.sum())(x)


def nested_vmap(x: Tensor) -> Tensor:
    return torch.vmap(torch.vmap(lambda one: gated(one) * 2.0))(x)


def grad(x: Tensor) -> Tensor:
    return torch.func.grad(lambda one: normed(gated(one)).pow(3).sum())(x)


def jvp(x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(lambda one: gated(one).square(), (x,), (x * 0.5,))
    return value + tangent


def jacrev(x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda one: normed(one).sum(0))(x).sum((0, 1))


def per_sample_gradients(x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda row: gated(row).square().sum()))(x)


def scan(x: Tensor) -> Tensor:
    def combine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    decay, state = torch.sigmoid(x), gated(x)
    return associative_scan(combine, (decay, state), 0, combine_mode="generic")[1]


def cond(x: Tensor) -> Tensor:
    def doubled(x: Tensor) -> Tensor:
        y = x * 2.0
        y.mul_(3.0)
        return y

    return torch.cond(x.shape[0] + x.detach().sum() * 0 > 0, doubled, lambda x: normed(x) - 1, (x,))


class InPlace(torch.autograd.Function):
    """Both of its directions write to a tensor of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        y.add_(1.0)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy * 2.0
        dx.mul_(5.0)
        return dx


def checkpointed(x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        y = normed(x) * 2.0
        y.mul_(3.0)
        y[1:].copy_(y[:-1].clone())
        return y

    return checkpoint(block, x, use_reentrant=False)


def cached(x: Tensor) -> Tensor:
    """As a cache of transformers starts: from a tensor of one dimension that holds nothing."""
    return torch.cat([torch.tensor([]), x], dim=-2)


def written_anywhere(x: Tensor) -> Tensor:
    """By an operation of which the passes do not know what it writes to."""
    y = x * 2.0
    torch.ops.aten.add_(y, 1.0)
    return gated(y)


PROGRAMS = [vmap, nested_vmap, grad, jvp, jacrev, per_sample_gradients, scan, cond, InPlace.apply]
PROGRAMS += [checkpointed, cached, written_anywhere]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: getattr(one, "__name__", "apply"))
def test_same_results(program: Program) -> None:
    def function(x: Tensor) -> Tensor:
        y = program(normed(x) + 0.5)
        return y + normed(y)

    # So that the least difference between two equations shows, and none between two roundings.
    x = values(4, 8, dtype=torch.float64)
    runs = {}
    for backend in ("none", "liger"):
        run, inner = compiled(function, backend, aot_eager)
        y = run(x)
        (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view(y.shape))
        runs[backend] = y.detach(), dx
    assert inner.counts[0]["rms_norm"]
    torch.testing.assert_close(runs["liger"], runs["none"])
    torch.testing.assert_close(runs["liger"][0], function(x).detach())


def test_block_mask() -> None:
    """The mask's function is data to flex_attention, and none of the rewrites' business."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def function(x: Tensor) -> Tensor:
        x = normed(x)
        return normed(flex_attention(x, x, x, block_mask=mask))

    x = values(1, 2, 128, 16).detach()
    run, inner = compiled(function, "liger", aot_eager)
    y = run(x)
    assert inner.counts == [{"rms_norm": 2}]
    torch.testing.assert_close(y, compiled(function, "none")[0](x))
