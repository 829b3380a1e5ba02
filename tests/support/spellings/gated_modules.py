"""Modules with a gated activation, to test what `fuse` recognises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_ops.fusion.layers.gated import GatedMLPs

HIDDEN, WIDTH = 16, 24


class Gated(nn.Module):
    """A class with an unspecific name; the subclasses each change one thing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, WIDTH)
        self.b = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(WIDTH, HIDDEN)
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(self.a(hidden), self.b(hidden)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class Packed(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.a = nn.Linear(HIDDEN, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(*self.a(hidden).chunk(2, -1)))


class UpFirst(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        up = self.b(hidden)
        return self.out(up * self.activation(self.a(hidden)))


class GateSecond(Gated):
    def gated(self, up: Tensor, gate: Tensor) -> Tensor:
        return self.activation(gate) * up


class Limited(Gated):
    """The clamped activation of DeepSeek-V4."""

    def __init__(self, limit: float = 7.0, alpha: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.limit, self.alpha, self.offset = limit, alpha, offset

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


def activated(activation: Any, module: Gated | None = None) -> nn.Module:
    module = Gated() if module is None else module
    del module.activation
    module.activation = ACT2FN[activation] if isinstance(activation, str) else activation
    return module


class Adapted(nn.Module):
    """A linear layer plus a low-rank product, as PEFT wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(module: Gated) -> nn.Module:
    module.a, module.out = Adapted(module.a), Adapted(module.out)
    return module


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and every gradient."""
    x = x.clone().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


*FIRST, LAST = GatedMLPs.rewrites
NO_OP = f"it computes none of {', '.join(FIRST)} and {LAST}"
