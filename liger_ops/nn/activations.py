"""Modules for the activations of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.activations.clamped_swiglu import clamped_swiglu
from ..ops.activations.geglu import geglu
from ..ops.activations.relu_squared import relu_squared
from ..ops.activations.swiglu import swiglu


class SwiGLU(nn.Module):
    """The SwiGLU activation of a gated MLP, without its projections. Calls `liger_ops.swiglu`.

        z = gate * gate_multiplier
        y = z * sigmoid(z) * up * down_multiplier

    See `liger_ops.swiglu` for precision and gradient. The module has no parameters.

    Args:
        gate_multiplier: multiplies the gate (Falcon-H1).
        down_multiplier: multiplies the result (Falcon-H1).

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument has another type, or gate or up is not floating point.
        ValueError: gate and up differ in shape, or the width of a packed gate is odd.

    Example:
        >>> liger_ops.nn.SwiGLU()(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.4621, -0.5379])
    """

    def __init__(self, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> None:
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.down_multiplier = down_multiplier
        nothing = torch.empty(0, device="meta")
        swiglu(nothing, nothing, gate_multiplier, down_multiplier)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, self.gate_multiplier, self.down_multiplier)

    def extra_repr(self) -> str:
        return f"gate_multiplier={self.gate_multiplier}, down_multiplier={self.down_multiplier}"


class ClampedSwiGLU(nn.Module):
    """SwiGLU with clamped inputs, as in GPT-OSS. Calls `liger_ops.clamped_swiglu`.

        g = min(gate, limit)
        u = max(min(up, limit), -limit)
        y = g * sigmoid(alpha * g) * (u + up_offset)

    See `liger_ops.clamped_swiglu` for precision and gradient. The module has no parameters.

    Args:
        alpha: multiplies the gate in the sigmoid.
        limit: the largest gate, and the largest magnitude of up, at least 0.
        up_offset: added to up.
        interleaved: whether a packed gate holds pairs (gate, up, gate, up) instead of halves.

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument has another type, or gate or up is not floating point.
        ValueError: limit is negative, gate and up differ in shape, the width of a packed gate is
            odd, or up is given although gate is interleaved.

    Example:
        >>> pairs = torch.tensor([9.0, -9.0, 1.0, 1.0])
        >>> liger_ops.nn.ClampedSwiGLU(interleaved=True)(pairs)
        tensor([-41.9997,   1.6916])
    """

    def __init__(
        self,
        alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0, interleaved: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.alpha = alpha
        self.limit = limit
        self.up_offset = up_offset
        self.interleaved = interleaved
        clamped_swiglu(torch.empty(0, device="meta"), None, alpha, limit, up_offset, interleaved)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return clamped_swiglu(gate, up, self.alpha, self.limit, self.up_offset, self.interleaved)

    def extra_repr(self) -> str:
        return (
            f"alpha={self.alpha}, limit={self.limit}, up_offset={self.up_offset},"
            f" interleaved={self.interleaved}"
        )


class GEGLU(nn.Module):
    """The GEGLU activation of a gated MLP, without its projections. Calls `liger_ops.geglu`.

        y = gelu(gate) * up

    See `liger_ops.geglu` for precision and gradient. The module has no parameters.

    Args:
        approximate: "tanh" or "none", as in `torch.nn.GELU`.

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument has another type, or gate or up is not floating point.
        ValueError: approximate is not as above, gate and up differ in shape, or the width of a
            packed gate is odd.

    Example:
        >>> liger_ops.nn.GEGLU()(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]))
        tensor([ 1.6824, -0.3176])
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        geglu(torch.empty(0, device="meta"), None, approximate)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class ReLUSquared(nn.Module):
    """The square of ReLU. Calls `liger_ops.relu_squared`.

        y = max(x, 0)**2

    Shape:
        x: floating point, any shape, any strides; y: the same, contiguous.

    Raises:
        TypeError: x is not floating point.

    Example:
        >>> liger_ops.nn.ReLUSquared()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)
