"""Modules that nearly have a gated activation, which `fuse` leaves and gives a reason for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_modules import NO_OP, WIDTH, Gated, Packed, activated
from liger_ops import fuse
from liger_ops.fusion import FuseReport


class Dropping(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.dropout(super().gated(gate, up), 0.1, self.training)


class WrongHalf(Packed):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * gate


class Thirds(Packed):
    """A projection alone, of which a part is left out."""

    def __init__(self) -> None:
        super().__init__()
        del self.out

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up, _ = self.a(hidden).chunk(3, -1)
        return self.gated(gate, up)


class Again(Packed):
    def __init__(self) -> None:
        super().__init__()
        del self.out

    def forward(self, hidden: Tensor) -> Tensor:
        return self.gated(self.a(hidden), self.a(hidden))


class Shifted(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up) + 1e-3


class ClampedAfter(Gated):
    """Clamped after the activation, as in Step-3.7."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate).clamp(max=7.0) * up


class MixedBetween(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.mix(super().gated(gate, up))


class Residual(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden


class Scaled(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden / 2)


class Widened(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate.float(), up.float())


class Detached(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up.detach())


class SharpInHalfPrecision(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up) * (1 if gate.dtype is torch.float32 else 1.05)


class OwnParameter(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class TwoArguments(Gated):
    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(hidden) * scale


class AsksItsWeight(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.a.weight.dtype))


class CallsTwice(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(self.a(hidden), self.a(hidden)))


class Remembers(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        self.last = gate
        return super().gated(gate, up)


def hooked(module: Gated) -> nn.Module:
    module.activation.register_forward_hook(lambda module, args, y: y + 1)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


# Modules that each differ from an op in one thing, and a part of the reason in the report.
NEAR_MISSES = [
    (activated("relu"), NO_OP),
    (activated("mish"), NO_OP),
    (activated("gelu_10"), NO_OP),
    (activated(nn.Sigmoid(), Packed()), NO_OP),
    (WrongHalf(), "it is swiglu, and of other parts of its projection than gate and up"),
    (Thirds(), "it is swiglu, and of other parts of its projection than gate and up"),
    (Again(), "it calls a, a, not its projection once"),
    (Shifted(), "it computes add beside swiglu"),
    (ClampedAfter(), NO_OP),
    (Dropping(), "it computes dropout beside swiglu (bfloat16, 3 dimensions, training)"),
    (MixedBetween(), "it has 4 children that may be projections"),
    (Residual(), "it computes add beside swiglu"),
    (Scaled(), "it changes its input before it projects it"),
    (Widened(), "it returns float32 for projections of bfloat16"),
    (Detached(), "it is swiglu, and of other tensors than the projections"),
    (SharpInHalfPrecision(), "mul(1.05) once, and it is swiglu"),
    (OwnParameter(), "it has parameters or buffers of its own: scale"),
    (TwoArguments(), "its forward takes (hidden, scale=1.0)"),
    (AsksItsWeight(), "it reads weight of its a"),
    (CallsTwice(), "it calls a, a, out, not one or two projections and a third"),
    (Remembers(), "its forward changes its attributes"),
    (hooked(Gated()), "activation, which would not be called, has hooks"),
    (with_own_forward(Gated()), "the instance has a forward of its own"),
]


@pytest.mark.parametrize(
    ("module", "reason"),
    NEAR_MISSES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _) in enumerate(NEAR_MISSES)],
)
def test_near_miss_is_left_with_the_reason(module: nn.Module, reason: str) -> None:
    # The report takes this name for that of a gated MLP.
    cls = type(module)
    module.__class__ = type(f"{cls.__name__}GLU", (cls,), {})
    named = type(module)
    report = fuse(nn.Sequential(module))
    assert not report
    assert type(module) is named
    assert [(entry.where, entry.class_name) for entry in report.left] == [("0", named.__name__)]
    assert reason in report.left[0].reason


def test_left_modules_that_no_one_calls_gated_are_not_reported() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert fuse(nn.ModuleList([plain, Shifted(), activated("relu")])) == FuseReport()
