"""gated_rms_norm against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import liger_ops


class Sigmoid(Qwen3NextRMSNormGated):
    """Everything in float32, and a sigmoid, as in Kimi Linear."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        wide = self.weight.to(torch.float32) * wide
        return (wide * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-next": (Qwen3NextRMSNormGated(96, 1e-5), {}),
    "zamba2": (Zamba2RMSNormGated(96, 32, 1e-5), {"norm_before_gate": False, "group_size": 32}),
    "falcon-h1": (
        FalconH1RMSNormGated(96, 1e-5, n_groups=3),
        {"group_size": 32, "casting_mode": "gemma"},
    ),
    "falcon-h1-after": (
        FalconH1RMSNormGated(96, 1e-5, norm_before_gate=False),
        {"norm_before_gate": False, "casting_mode": "gemma"},
    ),
    "kimi-linear": (Sigmoid(96, 1e-5), {"activation": "sigmoid", "casting_mode": "gemma"}),
}


@pytest.mark.parametrize("weight_dtype", (None, torch.float32))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", MODELS)
def test_definition_is_the_models_code(
    name: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Bit for bit, but that the op rounds Mamba 2's y to x.dtype, where its weight is float32."""
    module, options = MODELS[name]
    torch.manual_seed(0)
    x, gate = (torch.randn(2, 7, 96).to(dtype) for _ in range(2))
    module = module.to(weight_dtype or dtype)
    nn.init.normal_(module.weight)
    with torch.no_grad():
        y = module(x, gate).to(dtype)
        assert torch.equal(liger_ops.gated_rms_norm(x, gate, module.weight, 1e-5, **options), y)
