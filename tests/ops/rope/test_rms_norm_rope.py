"""rms_norm_rope against its two parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import liger_ops
from op_under_test import DEVICE


def packed_heads(dtype: torch.dtype, heads: int, heads_of_k: int, D: int) -> tuple[Tensor, Tensor]:
    """q and k of one product for q, k and v, each (B, S, heads, D)."""
    packed = torch.randn(2, 5, (heads + 2 * heads_of_k) * D, device=DEVICE).to(dtype)
    q, k, _ = packed.unflatten(-1, (-1, D)).split((heads, heads_of_k, heads_of_k), -2)
    return q, k


@pytest.mark.parametrize("mode", ("llama", "gemma", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_definition_is_that_of_its_parts(dtype: torch.dtype, mode: str) -> None:
    """Bit for bit; the gradients too where nothing is rounded between the two."""
    torch.manual_seed(0)
    q, k = packed_heads(dtype, 4, 2, 16)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k)]
    weights = [torch.randn(16, device=DEVICE).to(dtype).requires_grad_() for _ in range(2)]
    # Of learned frequencies.
    tables = [torch.randn(1, 5, 8, device=DEVICE).to(dtype).requires_grad_() for _ in range(2)]
    norm = (1e-5, 1.0, mode)
    heads = [x.transpose(1, 2) for x in inputs]
    found = liger_ops.rms_norm_rope(*heads, *tables, *weights, *norm, True)
    normed = (liger_ops.rms_norm(x, w, *norm) for x, w in zip(heads, weights, strict=True))
    expected = liger_ops.rope(*normed, *tables, True)
    for a, b, x in zip(found, expected, heads, strict=True):
        assert torch.equal(a, b) and a.stride() == x.stride()
    leaves = [*inputs, *weights, *tables]
    dy = [torch.randn_like(y) for y in expected]
    grads, others = (torch.autograd.grad(outputs, leaves, dy) for outputs in (found, expected))
    tolerance = {} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(grads, others, **tolerance)
