"""rms_norm against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import liger_ops


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_definition_is_the_models_code(dtype: torch.dtype) -> None:
    """Bitwise equal to Llama's norm, Gemma's, and a norm that stays in its dtype; equal to ATen's
    up to a rounding."""
    torch.manual_seed(0)
    x, weight = torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    llama, gemma = LlamaRMSNorm(96, 1e-5).to(dtype), GemmaRMSNorm(96, 1e-5).to(dtype)
    with torch.no_grad():
        llama.weight.copy_(weight)
        gemma.weight.copy_(weight)
        assert torch.equal(liger_ops.rms_norm(x, weight, 1e-5), llama(x))
        assert torch.equal(liger_ops.rms_norm(x, weight, 1e-5, 1.0, "gemma"), gemma(x))
    never_leaving = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.equal(liger_ops.rms_norm(x, weight, 1e-5, casting_mode="none"), never_leaving)
    aten = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
    torch.testing.assert_close(liger_ops.rms_norm(x, weight, 1e-5, casting_mode="gemma"), aten)
