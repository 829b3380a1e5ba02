"""Parts that a reader expects by name are in the report with their path, fused or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

import fuse_rules
from liger_ops import fuse


class ReGLU(nn.Module):
    """A gated activation with its projection alone, which is not an op."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.relu(gate)


class UnprojectedGEGLU(nn.Module):
    """The activation alone."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class PackedFeedForward(nn.Module):
    """An activation that is not an op."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(F.mish(gate) * up)


class AdaLayerNorm(nn.Module):
    """Nearly as in diffusers: the scale is not added to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.linear(condition).chunk(2, -1)
        return self.norm(x) * scale + shift


def apply_rotary_emb(x: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = freqs_cis
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


class Processor:
    """Like Flux's processor, which an attention calls."""

    def __call__(self, attention: Any, x: Tensor, freqs: Any) -> Tensor:
        return apply_rotary_emb(x, freqs)


class FluxAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: Tensor, freqs: Any) -> Tensor:
        return self.processor(self, x, freqs)


class OneByOneAttention(nn.Module):
    def forward(self, x: Tensor, freqs: Any) -> Tensor:
        return apply_rotary_emb(x, freqs)


def llama4_experts() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_local_experts": 2}
    return Llama4TextExperts(Llama4TextConfig(**sizes))


class TwoInputsRMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


# Modules, and a part of the reason in the report.
LEFT = [
    (TwoInputsRMSNorm(8), "norm", "its forward takes (x, scale)"),
    (AdaLayerNorm(), "modulated norm", "it computes none of modulated_layer_norm"),
    (ReGLU(), "gated activation", "it computes none of swiglu, geglu"),
    (UnprojectedGEGLU(), "gated activation", "it has 0 children that may be projections"),
    (PackedFeedForward(), "gated activation", "it computes none of swiglu, geglu"),
    (llama4_experts(), "gated activation", "it has no _apply_gate"),
    (FluxAttention(), "rotary embedding", "apply_rotary_emb is called by its Processor"),
    (OneByOneAttention(), "rotary embedding", "apply_rotary_emb takes (x, freqs_cis), not"),
]


@pytest.mark.parametrize(
    ("module", "kind", "reason"), LEFT, ids=[type(module).__name__ for module, _, _ in LEFT]
)
def test_is_left_with_the_reason(module: nn.Module, kind: str, reason: str) -> None:
    report = fuse(nn.ModuleDict({"part": module}))
    (left,) = [entry for entry in report.left if (entry.where, entry.kind) == ("part", kind)]
    assert left.class_name == type(module).__name__
    assert left.reason.startswith(reason)


def test_the_rules_know_them() -> None:
    """The rules by which test_fuse_every_model checks the report also find these modules."""
    model = nn.ModuleList([module for module, _, _ in LEFT if type(module) is not FluxAttention])
    found = {name for rule in fuse_rules.RULES for name in rule(model)}
    assert found >= {name for name, _ in model.named_children()}


class SuperGlueAttention(nn.Module):
    """The name has "Glue", which is not a gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def test_other_modules_are_not_named() -> None:
    model = nn.ModuleDict({"glue": SuperGlueAttention(), "linear": nn.Linear(8, 8)})
    # Every attention has a line about the doors that find it.
    assert {finding.kind for finding in fuse(model).findings} == {"rotary embedding", "attention"}
    assert not [name for rule in fuse_rules.RULES for name in rule(model)]
