"""Norms that `fuse` recognises, with class names that say nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rms(nn.Module):
    """The norm that the others change one thing in."""

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
