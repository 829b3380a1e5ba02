"""Modules with norms and gated norms, and near misses of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewriting import values

EPS = 1e-5


class Rms(nn.Module):
    """Llama's norm; the subclasses each change one thing in it."""

    def __init__(self, size: int = 24, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.small = eps

    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalised(x.float()).to(x.dtype)


class GemmaStyle(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalised(x.float()) * (1.0 + self.weight.float())).type_as(x)


class OneRounding(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalised(x.float()) * self.weight.float()).type_as(x)


class NeverWidened(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalised(x) * self.weight


class Gated(nn.Module):
    """Qwen3-Next's norm, in methods that the subclasses here change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(24, seed=2).detach())

    def normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)

    def factor(self, gate: Tensor) -> Tensor:
        return F.silu(gate.float())

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        y = self.weight * self.normalised(x).to(x.dtype)
        return (y * self.factor(gate)).to(x.dtype)


class OtherActivation(Gated):
    def factor(self, gate: Tensor) -> Tensor:
        return F.gelu(gate.float())


class TwiceGated(Gated):
    def factor(self, gate: Tensor) -> Tensor:
        return F.silu(gate.float()) * torch.sigmoid(gate.float())


class GateWithoutCast(Gated):
    def factor(self, gate: Tensor) -> Tensor:
        return F.silu(gate)


class RoundedActivation(Gated):
    def factor(self, gate: Tensor) -> Tensor:
        return F.silu(gate.float()).to(gate.dtype)


class EpsElsewhere(Gated):
    def normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + EPS)


class EpsTwice(Gated):
    def normalised(self, x: Tensor) -> Tensor:
        return super().normalised(x) + EPS


class NormAlsoReturned(Gated):
    def forward(self, x: Tensor, gate: Tensor) -> Any:
        y = self.weight * self.normalised(x).to(x.dtype)
        return (y * self.factor(gate)).to(x.dtype), y


class ActivationRoundsBefore(Gated):
    """The gate comes before the norm, and the product with it is rounded."""

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        wide = (x.float() * self.factor(gate)).to(x.dtype)
        return self.weight * self.normalised(wide).to(x.dtype)


class OtherDimension(Gated):
    """A group is every third column."""

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        s = (x.float() * self.factor(gate)).view(*x.shape[:-1], 8, 3)
        s = s * torch.rsqrt(s.pow(2).mean(-2, keepdim=True) + EPS)
        return self.weight * s.view(x.shape).to(x.dtype)


class WeightOfPositions(Gated):
    """The weight's rows are for positions; there are as many positions as groups."""

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        s = self.normalised(x.float().view(2, 3, 3, 8))
        y = self.weight.view(3, 1, 8) * s
        return (y.view(2, 3, 24) * self.factor(gate)).to(x.dtype)


# Each differs from gated_rms_norm in one thing.
NEARLY_GATED: dict[str, type[Gated]] = {cls.__name__: cls for cls in Gated.__subclasses__()}
