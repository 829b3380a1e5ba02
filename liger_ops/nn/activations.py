"""Activations of MLPs, as modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..ops.activations.clamped_swiglu import clamped_swiglu
from ..ops.activations.geglu import geglu
from ..ops.activations.relu_squared import relu_squared
from ..ops.activations.swiglu import swiglu
from .derived import OptionsModule, documented, no_rows

__all__ = ["GEGLU", "ClampedSwiGLU", "ReLUSquared", "SwiGLU"]


class _GateOptions(OptionsModule):
    def _check(self) -> None:
        self(no_rows(2))


@documented(swiglu)
@dataclass(eq=False, repr=False)
class SwiGLU(_GateOptions):
    """The SwiGLU activation of a gated MLP, without its projections.

    Example:
        >>> liger_ops.nn.SwiGLU()(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.4621, -0.5379])
    """

    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, *self.options)


@documented(clamped_swiglu)
@dataclass(eq=False, repr=False)
class ClampedSwiGLU(_GateOptions):
    """The SwiGLU activation with clamped inputs, as in GPT-OSS.

    Example:
        >>> pairs = torch.tensor([9.0, -9.0, 1.0, 1.0])
        >>> liger_ops.nn.ClampedSwiGLU(interleaved=True)(pairs)
        tensor([-41.9997,   1.6916])
    """

    alpha: float = 1.702
    limit: float = 7.0
    up_offset: float = 1.0
    interleaved: bool = False

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return clamped_swiglu(gate, up, *self.options)


@documented(geglu)
@dataclass(eq=False, repr=False)
class GEGLU(_GateOptions):
    """The GEGLU activation of a gated MLP, without its projections.

    Example:
        >>> liger_ops.nn.GEGLU()(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.6824, -0.3176])
    """

    approximate: str = "tanh"

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, *self.options)


@documented(relu_squared)
class ReLUSquared(nn.Module):
    """The square of ReLU.

    Example:
        >>> liger_ops.nn.ReLUSquared()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)
