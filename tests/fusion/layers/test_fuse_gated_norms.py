"""Modules that `fuse` recognises as norms with a gate, and modules that are nearly that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mamba2Config, Qwen3NextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from called_ops import Calls
from liger_ops import fuse, unfuse
from norm_modules import NEARLY_GATED, Gated


class SigmoidGated(Gated):
    def factor(self, gate: Tensor) -> Tensor:
        return torch.sigmoid(gate.float())


class OneRounding(SigmoidGated):
    """As in Kimi Linear."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.weight.float() * self.normalised(x)
        return (y * self.factor(gate)).to(x.dtype)


class OfTheGate(Gated):
    """It normalises the gate, and x is the gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(gate, x)


OPTIONS = {"eps": 1e-5, "norm_before_gate": True, "group_size": None}
LLAMA, GEMMA = {"casting_mode": "llama"}, {"casting_mode": "gemma"}
SILU, SIGMOID = {"activation": "silu"}, {"activation": "sigmoid"}
COMPUTES = [
    (Gated(), SILU | LLAMA),
    (SigmoidGated(), SIGMOID | LLAMA),
    (OneRounding(), SIGMOID | GEMMA),
    (OfTheGate(), SILU | LLAMA),
    (Qwen3NextRMSNormGated(24, 1e-5), SILU | LLAMA),
    (Zamba2RMSNormGated(24, 24, 1e-5), {"norm_before_gate": False} | SILU | LLAMA),
    (Zamba2RMSNormGated(24, 8, 1e-5), {"norm_before_gate": False, "group_size": 8} | SILU | LLAMA),
]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("module", "options"), COMPUTES)
def test_computes(module: nn.Module, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The options are found, and the results are equal bit for bit."""
    model = nn.ModuleDict({"norm": copy.deepcopy(module)}).to(dtype)
    nn.init.normal_(model["norm"].weight)
    x, gate = (torch.randn(2, 5, 24).to(dtype) for _ in range(2))
    expected = model["norm"](x, gate)
    (found,) = fuse(model).fused
    assert (found.op, found.options) == ("gated_rms_norm", OPTIONS | options)
    with Calls() as calls:
        assert torch.equal(model["norm"](x, gate=gate), expected)
    assert calls.counts == {"gated_rms_norm": 1}
    unfuse(model)
    assert type(model["norm"]) is type(module)


class OnlyX(Gated):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.weight * self.normalised(x).to(x.dtype)


# The last accepts inputs of two and three dimensions alone.
NEAR_MISSES = [
    *(cls() for cls in NEARLY_GATED.values()),
    OnlyX(),
    FalconH1RMSNormGated(24, n_groups=3),
]


@pytest.mark.parametrize("module", NEAR_MISSES, ids=lambda module: type(module).__name__)
def test_near_misses_are_left(module: nn.Module) -> None:
    model = nn.ModuleDict({"norm": module}).bfloat16()
    report = fuse(model)
    assert not report.fused and model["norm"] is module


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    if name == "mamba2":
        config: Any = Mamba2Config(
            **small, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8
        )
    else:
        config = Qwen3NextConfig(
            **small, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def trained(model: nn.Module) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ("mamba2", "qwen3-next"))
def test_models_train_alike(name: str) -> None:
    model = tiny(name)
    fused = copy.deepcopy(model)
    fuse(fused, activations=False, rope=False, attention=False, loss=False)
    expected, found = trained(model), trained(fused)
    assert expected[-1] < expected[0] - 0.1
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    # Mamba 2 in training has its norm in another function.
    fused.load_state_dict(model.state_dict())
    tokens = torch.arange(16)[None]
    with torch.no_grad(), Calls() as calls:
        logits = fused.eval()(input_ids=tokens, use_cache=True).logits
    assert calls.counts["gated_rms_norm"] == (2 if name == "mamba2" else 1)
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(input_ids=tokens, use_cache=True).logits)
