"""swiglu against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

import pytest
import torch
from transformers import FalconH1Config, LlamaConfig, Phi3Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import activation_checks
import liger_ops
from liger_ops import library

SIZES = {"hidden_size": 16, "intermediate_size": 40}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_agrees_with_the_models_code(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16).to(dtype)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaMLP(LlamaConfig(**SIZES, **heads)).to(dtype)
    activation_checks.assert_model_may_be_replaced(
        lambda: llama(x),
        lambda: llama.down_proj(liger_ops.swiglu(llama.gate_proj(x), llama.up_proj(x))),
        llama,
    )
    phi3 = Phi3MLP(Phi3Config(**SIZES, **heads, pad_token_id=0)).to(dtype)
    activation_checks.assert_model_may_be_replaced(
        lambda: phi3(x), lambda: phi3.down_proj(liger_ops.swiglu(phi3.gate_up_proj(x))), phi3
    )
    config = FalconH1Config(**SIZES, **heads, mlp_multipliers=[0.7, 0.3])
    falcon = FalconH1MLP(config).to(dtype)
    activation_checks.assert_model_may_be_replaced(
        lambda: falcon(x),
        lambda: falcon.down_proj(
            liger_ops.swiglu(falcon.gate_proj(x), falcon.up_proj(x), *config.mlp_multipliers)
        ),
        falcon,
    )


def test_inductor_hands_over_the_halves_of_a_projection_as_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strides = []
    record = library.OPS["swiglu"]
    definition = record.definition

    def recorded(gate: torch.Tensor, up: torch.Tensor, *options: float) -> torch.Tensor:
        strides.append((gate.stride(), up.stride()))
        return definition(gate, up, *options)

    monkeypatch.setattr(record, "definition", recorded)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: liger_ops.swiglu(*(x @ w).chunk(2, -1)), fullgraph=True)
    x, w = torch.randn(6, 8), torch.randn(8, 32)
    torch.testing.assert_close(compiled(x, w), definition(*(x @ w).chunk(2, -1)))
    assert strides[0] == ((32, 1), (32, 1))
