"""Modules that modulate their norms, as in diffusers, and near misses of them.

A docstring names the class of diffusers' models/normalization.py that a module computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modulated_blocks as blocks

N, C, T = 16, 12, 5


class Adaptive(nn.Module):
    """Base class: a projection of an embedding, and a norm."""

    chunks = 6

    def __init__(self, norm: nn.Module | None = None, columns: int = C) -> None:
        super().__init__()
        self.silu = nn.SiLU()
        self.linear = nn.Linear(columns, self.chunks * N)
        self.norm = nn.LayerNorm(N, 1e-6, elementwise_affine=False) if norm is None else norm

    def pieces(self, emb: Tensor) -> tuple[Tensor, ...]:
        return self.linear(self.silu(emb)).chunk(self.chunks, dim=1)

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return torch.randn(2, T, N, dtype=dtype), torch.randn(2, C, dtype=dtype)


class Zero(Adaptive):
    """`AdaLayerNormZero`: returns gates and the modulation of the MLP, too. A child may compute the
    embedding from optional arguments."""

    def __init__(self, norm: nn.Module | None = None, emb: nn.Module | None = None) -> None:
        super().__init__(norm)
        self.emb = emb

    def forward(
        self, x: Tensor, timestep: Any = None, labels: Any = None, emb: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, labels)
        shift, scale, *others = self.pieces(emb)
        return (self.norm(x) * (1 + scale[:, None]) + shift[:, None], *others)

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        x, emb = super().arguments(dtype)
        if self.emb is not None:
            return x, torch.tensor([3, 1]), torch.tensor([0, 2])
        return x, None, None, emb


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.labels = nn.Embedding(4, C), nn.Embedding(3, C)

    def forward(self, timestep: Tensor, labels: Tensor) -> Tensor:
        return self.steps(timestep) + self.labels(labels)


class Dual(Adaptive):
    """`SD35AdaLayerNormZeroX`: two modulations of one norm."""

    chunks = 5

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, shift_2, scale_2 = self.pieces(emb)
        y = self.norm(x)
        first = y * (1 + scale[:, None]) + shift[:, None]
        return first, gate, y * (1 + scale_2[:, None]) + shift_2[:, None]


class Continuous(Adaptive):
    """`AdaLayerNormContinuous`: the embedding is cast to x's dtype."""

    chunks = 2

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = torch.chunk(self.linear(self.silu(emb).to(x.dtype)), 2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class OfTwo(Adaptive):
    """`CogVideoXLayerNormZero`: x and a context, by one norm with parameters."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(N))

    def forward(self, x: Tensor, context: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, shift_c, scale_c, gate_c = self.pieces(F.silu(emb))
        y = self.norm(x) * (1 + scale)[:, None] + shift[:, None]
        context = self.norm(context) * (1 + scale_c).unsqueeze(1) + shift_c.unsqueeze(1)
        return y, context, gate[:, None, :], gate_c[:, None, :]

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, emb = super().arguments(dtype)
        return x, torch.randn(2, 3, N, dtype=dtype), emb


class ForAll(Adaptive):
    """`AdaLayerNorm` with a table: one row for the whole tensor."""

    chunks = 2

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, C)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(self.emb(timestep))).chunk(2, dim=0)
        return self.norm(x) * (1 + scale) + shift

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return super().arguments(dtype)[0], torch.tensor(2)


class OfTokens(Adaptive):
    """The embedding has a row for each token, or for each sample with a dimension of size 1."""

    chunks = 2

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.linear(emb).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return super().arguments(dtype)[0], torch.randn(2, T, C, dtype=dtype)


class Last(Adaptive):
    """`LuminaLayerNormContinuous` with an RMS norm: no shift, and a projection of the result."""

    chunks = 1

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__(norm or blocks.RMSNorm(N, 1e-5))
        self.linear_2 = nn.Linear(N, 4)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = self.norm(x) * (1 + self.linear(self.silu(emb)))[:, None]
        return self.linear_2(y)


MODULES = {
    "zero": (Zero, ["modulated_layer_norm"]),
    "float32": (
        lambda: Zero(blocks.FP32LayerNorm(N, elementwise_affine=False)), ["modulated_layer_norm"]
    ),
    "rms": (lambda: Zero(blocks.RMSNorm(N, 1e-5)), ["modulated_rms_norm"]),
    "own-embedding": (lambda: Zero(emb=TwoTables()), ["modulated_layer_norm"]),
    "dual": (Dual, ["modulated_layer_norm"] * 2),
    "continuous": (Continuous, ["modulated_layer_norm"]),
    "of-two": (OfTwo, ["modulated_layer_norm"] * 2),
    "for-all": (ForAll, ["modulated_layer_norm"]),
    "of-tokens": (OfTokens, ["modulated_layer_norm"]),
    "last": (Last, ["modulated_rms_norm"]),
}  # fmt: skip


class AdaNorm(Adaptive):
    """Has a class name for which `fuse` reports a reason; the near misses take the same name."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        shift, scale, *others = self.pieces(emb)
        return self.modulated(x, scale, shift), *others

    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class OfPositions(AdaNorm):
    """scale[t] is for position t."""

    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale) + shift


class Doubled(AdaNorm):
    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (2 + scale[:, None]) + shift[:, None]


class Gated(AdaNorm):
    """Computes its gate."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        shift, scale, gate, *_ = self.pieces(emb)
        return self.modulated(x, scale, shift), gate.tanh()


class Remembers(AdaNorm):
    seen = 0

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        self.seen = x.shape[0]
        return super().forward(x, emb)


class InTraining(AdaNorm):
    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = super().modulated(x, scale, shift)
        return y if self.training else self.norm(x)


class OfTheScale(AdaNorm):
    """Its norm is also applied to the scale."""

    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return super().modulated(x, self.norm(scale), shift)


class Wide(AdaNorm):
    """The scale is float32, whatever its projection is."""

    def modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (self.norm(x) * (1 + scale[:, None].float()) + shift[:, None]).to(x.dtype)


def with_a_hook() -> nn.Module:
    module = AdaNorm()
    module.norm.register_forward_hook(lambda module, args, y: y)
    return module


for near in (OfPositions, Doubled, Gated, Remembers, InTraining, OfTheScale, Wide):
    near.__name__ = AdaNorm.__name__

NEAR_MISSES = {
    "positions": (OfPositions, "it fails on fake tensors"),
    "doubled": (Doubled, "has 2 where the op has 1"),
    "gated": (Gated, "it computes tanh beside modulated_layer_norm"),
    "remembers": (Remembers, "changes its attributes"),
    "in-training": (InTraining, "it does more than compute its result"),
    "of-the-scale": (OfTheScale, "it computes layer_norm beside"),
    "wide": (Wide, "it casts to torch.float32"),
    "hook": (with_a_hook, "has hooks"),
}
