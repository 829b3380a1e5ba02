"""Tensors of 3 billion elements, where offsets of rows do not fit 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
from op_under_test import DEVICE, SIMULATED

pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.skipif(
        DEVICE == "cpu" or SIMULATED, reason="takes 24 GB of a device, and minutes without one"
    ),
]

N = 8192
ROWS = 3 * 10**9 // N
# First rows to compare: at the start, on both sides of element 2**31, and the last ones.
PLACES = (0, 2**31 // N - 1, 2**31 // N, ROWS - 2)


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return tuple(
        torch.rand(N, generator=generator, device=DEVICE).bfloat16().add_(0.5) for _ in range(2)
    )


def target(rows: int, first: int = 0) -> Tensor:
    return (torch.arange(first, first + rows, device=DEVICE) * 37) % N


def streams(x: Tensor) -> Tensor:
    return x.view(len(x), 4, N // 4)


def coefficients(x: Tensor) -> tuple[Tensor, Tensor]:
    """h_post and h_res of each row, from the row's first elements."""
    return x.detach()[:, :4], x.detach()[:, :16].reshape(-1, 4, 4)


def experts(x: Tensor, first: int) -> Tensor:
    """Every row goes to one of two experts."""
    gate_up = weights()[0].view(2, 2, N // 4).repeat(1, 8, 4)
    down = gate_up[:, :8].mT.contiguous()
    ids = target(len(x), first).unsqueeze(-1) % 2
    return liger_ops.moe_experts(x, gate_up, down, ids, torch.ones_like(ids, dtype=x.dtype))


Call = Callable[[Tensor, int], Any]

# Calls of each op on the rows of x from `first` on.
CALLS: dict[str, Call] = {
    "rms_norm": lambda x, first: liger_ops.rms_norm(x, weights()[0]),
    "gated_rms_norm": lambda x, first: liger_ops.gated_rms_norm(x, x.detach(), weights()[0]),
    "mhc_pre": lambda x, first: liger_ops.mhc_pre(streams(x), streams(x.detach())[:, :, 0]),
    "mhc_post_res": lambda x, first: liger_ops.mhc_post_res(
        streams(x), streams(x.detach())[:, 0], *coefficients(x)
    ).reshape(x.shape),
    "modulated_rms_norm": lambda x, first: liger_ops.modulated_rms_norm(x, *weights()),
    "modulated_layer_norm": lambda x, first: liger_ops.modulated_layer_norm(x, x.detach()),
    "layer_norm": lambda x, first: liger_ops.layer_norm(x, *weights()),
    "dyt": lambda x, first: liger_ops.dyt(x, weights()[0][:1], *weights()),
    "poly_norm": lambda x, first: liger_ops.poly_norm(x, weights()[0][:3], weights()[1][:1]),
    "softmax": lambda x, first: liger_ops.softmax(x),
    "embedding": lambda x, first: liger_ops.embedding(x, torch.arange(len(x), device=DEVICE)),
    "sparsemax": lambda x, first: liger_ops.sparsemax(x),
    "swiglu": lambda x, first: liger_ops.swiglu(x),
    "moe_experts": experts,
    "relu_squared": lambda x, first: liger_ops.relu_squared(x),
    "cross_entropy": lambda x, first: liger_ops.cross_entropy(
        x, target(len(x), first), reduction="none"
    ),
    "divergence": lambda x, first: liger_ops.divergence(x, x.detach().flip(-1)),
    "tvd": lambda x, first: liger_ops.tvd(x, x.detach().flip(-1), reduction="none").sum(-1),
    "log_prob": lambda x, first: sum(liger_ops.log_prob(x, target(len(x), first))),
}


def test_rows_far_into_memory_are_as_alone() -> None:
    """The results and gradients of a few rows equal those of the same rows alone, up to a rounding.

    The ops run one after the other in one test, because two at once would not fit in memory.
    """
    for call in CALLS.values():
        generator = torch.Generator(DEVICE).manual_seed(0)
        x = torch.empty(ROWS, N, device=DEVICE, dtype=torch.bfloat16)
        x.normal_(generator=generator).requires_grad_()
        y = call(x, 0)
        y.backward(torch.ones((), dtype=y.dtype, device=DEVICE).expand(y.shape))
        for first in PLACES:
            alone = x.detach()[first : first + 2].clone().requires_grad_()
            expected = call(alone, first)
            expected.sum().backward()
            torch.testing.assert_close(y[first : first + 2], expected)
            torch.testing.assert_close(x.grad[first : first + 2], alone.grad)
