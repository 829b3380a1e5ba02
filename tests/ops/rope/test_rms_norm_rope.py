"""rms_norm_rope against float64 truth, its two parts, and the models' code that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3 import modeling_qwen3

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import DEVICE

OP = OPS["rms_norm_rope"]


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


MODELS: dict[str, tuple[Any, type[nn.Module], tuple[float, float, str]]] = {
    "qwen3": (modeling_qwen3, modeling_qwen3.Qwen3RMSNorm, (1e-6, 0.0, "llama")),
    "gemma3": (modeling_gemma3, modeling_gemma3.Gemma3RMSNorm, (1e-6, 1.0, "gemma")),
}


@pytest.mark.parametrize("name", MODELS)
def test_definition_is_the_models_code(name: str) -> None:
    models_code, norm, options = MODELS[name]
    torch.manual_seed(0)
    q, k = packed_heads(torch.float32, 4, 2, 16)
    norms = [norm(16, eps=1e-6).to(DEVICE) for _ in range(2)]
    for module in norms:
        nn.init.normal_(module.weight)
    angles = torch.randn(1, 5, 8, device=DEVICE).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()
    leaves = [module.weight for module in norms]
    normed = (module(x).transpose(1, 2) for module, x in zip(norms, (q, k), strict=True))
    expected = models_code.apply_rotary_pos_emb(*normed, *tables)
    heads = (q.transpose(1, 2), k.transpose(1, 2))
    found = liger_ops.rms_norm_rope(*heads, *tables, *leaves, *options)
    torch.testing.assert_close(found, expected)
    dy = [torch.randn_like(y) for y in expected]
    grads, others = (torch.autograd.grad(outputs, leaves, dy) for outputs in (found, expected))
    torch.testing.assert_close(grads, others)


def test_module_is_the_op() -> None:
    module = liger_ops.nn.RMSNormRope(8, 1e-3, 1.0, "gemma", True, sections=(1, 2, 1))
    for weight in (module.q_weight, module.k_weight):
        assert torch.equal(weight, torch.zeros(8))
        nn.init.normal_(weight)
    q, k, table = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(3, 1, 5, 8)
    weights = (module.q_weight, module.k_weight)
    expected = liger_ops.rms_norm_rope(
        q, k, table, table, *weights, 1e-3, 1.0, "gemma", True, sections=[1, 2, 1]
    )
    for a, b in zip(module(q, k, table, table), expected, strict=True):
        assert torch.equal(a, b)
    assert repr(module) == (
        "RMSNormRope(8, eps=0.001, offset=1.0, casting_mode='gemma', interleaved=True,"
        " per_pair=False, sections=[1, 2, 1], deinterleave=False, elementwise_affine=True)"
    )
    bare, tables = liger_ops.nn.RMSNormRope(8, elementwise_affine=False), (table[0, 0],) * 2
    found, expected = bare(q, k, *tables), liger_ops.rms_norm_rope(q, k, *tables)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    anything = liger_ops.nn.RMSNormRope(None, elementwise_affine=False)
    assert torch.equal(anything(q, k, *tables)[0], expected[0])
    with pytest.raises(ValueError, match=r"^RMSNormRope: q must be \(B, heads, S, 8\), got shape"):
        bare(q[..., :4], k[..., :4], *(x[:, :4] for x in tables))
    with pytest.raises(ValueError, match="^RMSNormRope: head_dim must be a positive int"):
        liger_ops.nn.RMSNormRope(None)
    with pytest.raises(ValueError, match="casting_mode must be one of 'llama', 'gemma', 'none'"):
        liger_ops.nn.RMSNormRope(8, casting_mode="other")


def test_rejects() -> None:
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 1, 3, 8)
    table, weight = torch.zeros(3, 8), torch.zeros(8)
    for args, message in (
        ((q, k[:1], table, table), "k must have the shape of (B, H', S, D) for q of (B, H, S, D),"),
        ((q, k, table[:2], table), "cos must be (S, R), (1, S, R) or (B, S, R) for q's S of 3 and"),
        (
            (q, k, table, table, weight, weight[:4]),
            "k_weight must have the shape of (D,) for q of (B, H, S, D)",
        ),
        ((q, k, table, table, weight, None, 1e-6, 1.0), "offset must be 0 without k_weight, to"),
        ((q, k, table, table, weight, weight, -1.0), "eps must be a number of at least 0, got -1"),
        (
            (q, k, table, table, weight, weight, 1e-6, 0.0, "other"),
            "casting_mode must be one of ",
        ),
    ):
        op_checks.assert_rejects(OP, args, message)
    with pytest.raises(TypeError, match="^rms_norm_rope: q_weight must be a floating point tensor"):
        liger_ops.rms_norm_rope(q, k, table, table, weight.long(), weight)
