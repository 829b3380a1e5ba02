"""Modules in which `fuse` finds a gated activation, for every op and option."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from gated_modules import (
    HIDDEN,
    Adapted,
    Gated,
    GateSecond,
    Limited,
    Packed,
    UpFirst,
    activated,
    adapted,
    results,
)
from liger_ops import fuse


class InPairs(Packed):
    def forward(self, hidden: Tensor) -> Tensor:
        packed = self.a(hidden)
        return self.out(self.gated(packed[..., ::2], packed[..., 1::2]))


class PackedUpFirst(Packed):
    """As in the decoder of Moonshine."""

    def forward(self, hidden: Tensor) -> Tensor:
        up, gate = self.a(hidden).chunk(2, dim=-1)
        return self.out(self.activation(gate) * up)


class GEGLU(nn.Module):
    """The activation of diffusers with its projection alone, whose second half is the gate."""

    def __init__(self, activation: Any = F.gelu) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, 48)
        self.activation = activation

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs.get("scale") is not None:
            raise RuntimeError("scale is no longer accepted")
        hidden, gate = self.proj(hidden).chunk(2, dim=-1)
        return hidden * self.activation(gate)


class SwiGLU(GEGLU):
    def __init__(self) -> None:
        super().__init__(nn.SiLU())

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


class Plain(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.activation = ACT2FN["relu2"]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.activation(self.a(hidden)))


class Multiplied(Gated):
    """Multipliers as in Falcon-H1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_multiplier, self.down_multiplier = 0.7, 0.3

    def forward(self, hidden: Tensor) -> Tensor:
        y = self.b(hidden) * self.activation(self.a(hidden) * self.gate_multiplier)
        return self.out(y) * self.down_multiplier


class LimitedInPairs(InPairs):
    """Clamped and interleaved, as in the experts of GPT-OSS."""

    limit, alpha = 7.0, 1.702

    def __init__(self) -> None:
        super().__init__()
        self.limit = 7.0

    gated = Limited.gated
    offset = 1.0


def adapted_projection(module: GEGLU) -> nn.Module:
    module.proj = Adapted(module.proj)
    return module


def clamped(alpha: float, limit: float, up_offset: float, interleaved: bool) -> dict[str, Any]:
    return {"alpha": alpha, "limit": limit, "up_offset": up_offset, "interleaved": interleaved}


COMPUTES = [
    (Gated(), "swiglu", {}),
    (UpFirst(), "swiglu", {}),
    (GateSecond(), "swiglu", {}),
    (adapted(Gated()), "swiglu", {}),
    (activated(F.silu), "swiglu", {}),
    (Packed(), "swiglu", {}),
    (PackedUpFirst(), "swiglu", {}),
    (activated("gelu", PackedUpFirst()), "geglu", {"approximate": "none"}),
    (GEGLU(), "geglu", {"approximate": "none"}),
    (adapted_projection(GEGLU()), "geglu", {"approximate": "none"}),
    (SwiGLU(), "swiglu", {}),
    (Multiplied(), "swiglu", {"gate_multiplier": 0.7, "down_multiplier": 1.0}),
    (activated("gelu_pytorch_tanh"), "geglu", {"approximate": "tanh"}),
    (activated("gelu_pytorch_tanh", Packed()), "geglu", {"approximate": "tanh"}),
    (activated("gelu", GateSecond()), "geglu", {"approximate": "none"}),
    (activated("quick_gelu"), "clamped_swiglu", clamped(1.702, math.inf, 0.0, False)),
    (InPairs(), "clamped_swiglu", clamped(1.0, math.inf, 0.0, True)),
    (Limited(), "clamped_swiglu", clamped(1.0, 7.0, 0.0, False)),
    (Limited(3.5, 1.702, 1.0), "clamped_swiglu", clamped(1.702, 3.5, 1.0, False)),
    (LimitedInPairs(), "clamped_swiglu", clamped(1.702, 7.0, 1.0, True)),
    (Plain(), "relu_squared", {}),
]


@pytest.mark.parametrize(
    ("module", "op", "options"),
    COMPUTES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _, _) in enumerate(COMPUTES)],
)
def test_op_and_options_are_found(module: nn.Module, op: str, options: dict[str, Any]) -> None:
    """Results equal the module's in float32 and float64, and are as near to truth in bfloat16."""
    model = nn.Sequential(copy.deepcopy(module))
    report = fuse(model)
    assert [(entry.op, entry.options) for entry in report.fused] == [(op, options)]
    assert report.fused[0].kind == "gated activation"
    x = 4 * torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for train in (False, True):
        expected = results(module.train(train), x)
        for ours, theirs in zip(results(model.train(train), x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    low = x.bfloat16()
    truth = results(copy.deepcopy(module).bfloat16().double(), low.double())
    before = results(copy.deepcopy(module).bfloat16(), low)
    for ours, theirs, true in zip(results(model.bfloat16(), low), before, truth, strict=True):
        assert ours.dtype is torch.bfloat16
        error, error_before = ((y.double() - true).norm() for y in (ours, theirs))
        assert error <= 1.5 * error_before + 2**-8 * true.norm()


def test_further_arguments_reach_the_original_forward() -> None:
    module = GEGLU()
    assert fuse(nn.Sequential(module)).fused
    x = torch.randn(2, 3, HIDDEN)
    torch.testing.assert_close(module(x, scale=None), GEGLU.forward(module, x))
    for args, kwargs in (((0.5,), {}), ((), {"scale": 0.5})):
        with pytest.raises(RuntimeError, match="scale is no longer accepted"):
            module(x, *args, **kwargs)
