"""geglu against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

import pytest
import torch
from transformers import GemmaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP

import activation_checks
import liger_ops


@pytest.mark.parametrize("approximate", ("tanh", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_agrees_with_the_models_code(dtype: torch.dtype, approximate: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16).to(dtype)
    act = "gelu_pytorch_tanh" if approximate == "tanh" else "gelu"
    gemma = GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=40)).to(dtype)
    # In Gemma's code "gelu" means the tanh approximation.
    gemma.act_fn = ACT2FN[act]
    activation_checks.assert_model_may_be_replaced(
        lambda: gemma(x),
        lambda: gemma.down_proj(
            liger_ops.geglu(gemma.gate_proj(x), gemma.up_proj(x), approximate=approximate)
        ),
        gemma,
    )
