"""`fuse` on the gated activation of experts as written in transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from gated_modules import HIDDEN, NO_OP, WIDTH
from liger_ops import fuse, unfuse


def experts(
    gate: Callable[[Any, Tensor], Tensor] | None = None, activation: str = "silu"
) -> nn.Module:
    """A module as written in transformers, with `_apply_gate` if one is given."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 3
            self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * WIDTH, HIDDEN) / 4)
            self.down_proj = nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 4)
            self.act_fn = ACT2FN[activation]

        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            y = torch.zeros_like(hidden)
            for i in range(index.shape[1]):
                gate_up = torch.einsum("mh,mwh->mw", hidden, self.gate_up_proj[index[:, i]])
                gate, up = gate_up.chunk(2, -1)
                gated = self.act_fn(gate) * up
                out = torch.einsum("mw,mhw->mh", gated, self.down_proj[index[:, i]])
                y = y + out * weights[:, i, None]
            return y

    if gate is not None:
        Experts._apply_gate = gate
    config = SimpleNamespace(_experts_implementation="batched_mm")
    return use_experts_implementation(Experts)(config)


def step(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate).clamp(max=7.0) * up


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    ("gate", "activation", "op"),
    [(None, "silu", "swiglu"), (None, "gelu", "geglu"), (in_pairs, "silu", "clamped_swiglu")],
)
def test_experts(
    gate: Callable[[Any, Tensor], Tensor] | None, activation: str, op: str, implementation: str
) -> None:
    module = experts(gate, activation)
    module.config._experts_implementation = implementation
    x = torch.randn(4, HIDDEN)
    index, weights = torch.tensor([[0, 2], [1, 2], [0, 1], [2, 1]]), torch.rand(4, 2)
    expected = module(x, index, weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    assert [entry.op for entry in fuse(module).fused] == [op]
    y = module(x, index, weights)
    torch.testing.assert_close(y, expected)
    grads = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)
    assert unfuse(module) == 1


def test_experts_near_misses() -> None:
    module = experts(step)
    assert [entry.reason for entry in fuse(module).left] == [NO_OP]
    module = experts(lambda self, gate_up: self.gate_up_proj @ gate_up)
    assert "its _apply_gate fails on fake tensors" in fuse(module).left[0].reason
    module = experts()
    module.act_fn.register_forward_hook(lambda *_: None)
    assert [entry.reason for entry in fuse(module).left] == [
        "act_fn, which would not be called, has hooks"
    ]


def test_eager_experts_that_have_the_activation_in_their_forward_are_left() -> None:
    module = experts()
    module.config._experts_implementation = "eager"
    report = fuse(module)
    assert not report
    assert "its experts_implementation is 'eager'" in report.left[0].reason
    x, index, weights = (
        torch.randn(4, HIDDEN),
        torch.zeros(4, 1, dtype=torch.long),
        torch.ones(4, 1),
    )
    eager = module(x, index, weights)
    module.config._experts_implementation = "batched_mm"
    assert len(fuse(module)) == 1
    torch.testing.assert_close(module(x, index, weights), eager)


def test_class_of_another_make_is_not_undone() -> None:
    """A parametrization also changes the class; unfuse changes nothing until it is removed."""
    module = experts()
    model = nn.ModuleDict({"experts": module, "norm": nn.LayerNorm(8)})
    assert len(fuse(model)) == 2
    parametrize.register_parametrization(module, "down_proj", nn.Identity())
    norm = model["norm"]
    with pytest.raises(RuntimeError, match="the class of a ParametrizedExperts was changed"):
        unfuse(model)
    assert model["norm"] is norm
    parametrize.remove_parametrizations(module, "down_proj")
    assert unfuse(model) == 2
