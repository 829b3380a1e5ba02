"""Modules that call the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from .ops.clamped_swiglu import clamped_swiglu
from .ops.fused_add_rms_norm import fused_add_rms_norm
from .ops.geglu import geglu
from .ops.group_norm import group_norm
from .ops.layer_norm import layer_norm
from .ops.log_softmax import log_softmax
from .ops.relu_squared import relu_squared
from .ops.rms_norm import rms_norm
from .ops.rope import rope
from .ops.softmax import softmax
from .ops.swiglu import swiglu

__all__ = [
    "GEGLU",
    "ClampedSwiGLU",
    "FusedAddRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LogSoftmax",
    "RMSNorm",
    "ReLUSquared",
    "Rope",
    "Softmax",
    "SwiGLU",
]


class _RMSNormBase(nn.Module):
    """The weight and the options of the two modules that normalise by the root mean square."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        weight = None
        if hidden_size is not None:
            _check_size(owner, "hidden_size", hidden_size)
            if elementwise_affine:
                weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        elif elementwise_affine:
            raise ValueError(f"{owner}: hidden_size must be a positive int, got None")
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", weight)
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise now, not at the first forward, what the op says of the options."""
        nothing = torch.empty(0, 1, device="meta")
        weight = torch.empty(1, device="meta") if self.elementwise_affine else None
        rms_norm(nothing, weight, self.eps, self.offset, self.casting_mode)

    def _check_width(self, x: Tensor) -> None:
        # With a weight the op compares its size.
        if self.weight is None and self.hidden_size not in (None, x.shape[-1]):
            raise ValueError(
                f"{type(self).__name__}: x must be (..., {self.hidden_size}),"
                f" got shape {tuple(x.shape)}"
            )

    def reset_parameters(self) -> None:
        """Make weight + offset one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset},"
            f" casting_mode={self.casting_mode!r}, elementwise_affine={self.elementwise_affine}"
        )


class RMSNorm(_RMSNormBase):
    """Root-mean-square normalisation over the last dimension, by `liger_ops.rms_norm`.

        y = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)

    Where the result is rounded, the precision and the gradient are those of `liger_ops.rms_norm`. y
    has x's dtype, whatever weight's.

    Args:
        hidden_size: the size N of the last dimension. None, for any, without a weight only.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x: (..., N), floating point, any strides; y: the same, contiguous.

    Raises:
        TypeError: an argument is of another type, or x is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, or x is of another
            width.

    Example:
        >>> liger_ops.nn.RMSNorm(2, elementwise_affine=False)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]])
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_width(x)
        return rms_norm(x, self.weight, self.eps, self.offset, self.casting_mode)


class FusedAddRMSNorm(_RMSNormBase):
    """Residual addition and root-mean-square normalisation, by `liger_ops.fused_add_rms_norm`.

        s = x + residual
        y = s / sqrt(mean(s**2, -1) + eps) * (weight + offset)

    For a block that normalises the sum and passes it on: the sum is written once, and its own
    gradient joins the norm's in one kernel. Precision and gradient are those of
    `liger_ops.fused_add_rms_norm`.

    Args:
        hidden_size: the size N of the last dimension. None, for any, without a weight only.
        eps: added to the mean square, at least 0.
        offset: added to the weight: 1.0 for models that store weight - 1 (Gemma), else 0.
        casting_mode: "llama", "gemma" or "none": see `liger_ops.rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Attributes:
        weight: (N,), or None. It starts as 1 - offset.

    Shape:
        x, residual: (..., N), floating point, any strides; y and s: the same, contiguous, of the
            dtype of x + residual.

    Raises:
        TypeError: an argument is of another type, or x or residual is not floating point.
        ValueError: hidden_size is not positive, an option is not as above, or x is of another width
            than hidden_size, or of another shape than residual.

    Example:
        >>> y, s = liger_ops.nn.FusedAddRMSNorm(2)(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]))
        >>> s.tolist()
        [[3.0, 4.0]]
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self._check_width(x)
        return fused_add_rms_norm(
            x, residual, self.weight, self.eps, self.offset, self.casting_mode
        )


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` by `liger_ops.layer_norm`: the same arguments, parameters, state dict.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    with mean and biased variance over the last dimensions, those of normalized_shape. It is a
    subclass, so that what asks for `torch.nn.LayerNorm`, such as a rule against weight decay on
    norms, finds it. Precision and gradient are those of `liger_ops.layer_norm`.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions. None,
            for the last dimension of whatever size, without parameters only.
        eps: added to the variance, at least 0.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias too; without a weight there is none.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: of normalized_shape, or None. They start as ones and zeros.

    Shape:
        input: (..., *normalized_shape), floating point, any strides; the output: the same,
            contiguous.

    Raises:
        TypeError: an argument is of another type, or input is not floating point.
        ValueError: a size is not positive, eps is negative, or input does not end in
            normalized_shape.

    Example:
        >>> liger_ops.nn.LayerNorm(2, elementwise_affine=False)(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.0000,  1.0000]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if normalized_shape is None:
            if elementwise_affine:
                raise ValueError(
                    "LayerNorm: normalized_shape must be an int or a tuple of ints, got None"
                )
            sizes: tuple[int, ...] = ()
        elif isinstance(normalized_shape, Sequence):
            sizes = tuple(normalized_shape)
            if not sizes:
                raise ValueError("LayerNorm: normalized_shape must name a dimension, got ()")
        else:
            sizes = (normalized_shape,)
        for size in sizes:
            _check_size("LayerNorm", "normalized_shape", size)
        layer_norm(torch.empty(0, 1, device="meta"), None, None, eps)
        super().__init__(sizes, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        dims = len(shape)
        if input.shape[input.dim() - dims :] != shape:
            sizes = ", ".join(map(str, shape))
            raise ValueError(
                f"LayerNorm: input must be (..., {sizes}), got shape {tuple(input.shape)}"
            )
        if dims <= 1:
            return layer_norm(input, self.weight, self.bias, self.eps)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return layer_norm(input.flatten(-dims), weight, bias, self.eps).reshape(input.shape)


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` by `liger_ops.group_norm`: the same arguments, parameters, state dict.

        y[n, c] = (x[n, c] - mean(n, g)) / sqrt(var(n, g) + eps) * weight[c] + bias[c]

    with mean and biased variance over all positions and channels of the group g that holds channel
    c. Precision and gradient are those of `liger_ops.group_norm`.

    Args:
        num_groups: the number of groups, a divisor of num_channels.
        num_channels: the size C of the second dimension. Without parameters, as in torch, it is not
            checked: input may have any multiple of num_groups.
        eps: added to the variance, at least 0.
        affine: whether there are weight and bias.
        device, dtype: of the parameters.

    Attributes:
        weight, bias: (C,), or None. They start as ones and zeros.

    Shape:
        input: (N, C, *spatial), floating point, any strides; the output: the same, contiguous.

    Raises:
        TypeError: an argument is of another type, or input is not floating point.
        ValueError: num_groups does not divide num_channels, a size is not positive, eps is
            negative, or input has another number of channels than the parameters.

    Example:
        >>> norm = liger_ops.nn.GroupNorm(2, 4, affine=False)
        >>> norm(torch.tensor([[1.0, 3.0, 0.0, 4.0]]))
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_size("GroupNorm", "num_groups", num_groups)
        _check_size("GroupNorm", "num_channels", num_channels)
        if num_channels % num_groups != 0:
            raise ValueError(
                f"GroupNorm: num_groups must be a divisor of num_channels, {num_channels},"
                f" got {num_groups}"
            )
        group_norm(torch.empty(0, 1, device="meta"), 1, None, None, eps)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """The activation of a gated MLP, by `liger_ops.swiglu`: no projections, no parameters.

        z = gate * gate_multiplier
        y = z * sigmoid(z) * up * down_multiplier

    Precision and gradient are those of `liger_ops.swiglu`.

    Args:
        gate_multiplier: multiplies the gate (Falcon-H1).
        down_multiplier: multiplies the result (Falcon-H1).

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument is of another type, or gate or up is not floating point.
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
    """SwiGLU within limits, as in GPT-OSS, by `liger_ops.clamped_swiglu`: no parameters.

        g = min(gate, limit)
        u = max(min(up, limit), -limit)
        y = g * sigmoid(alpha * g) * (u + up_offset)

    Precision and gradient are those of `liger_ops.clamped_swiglu`.

    Args:
        alpha: multiplies the gate in the sigmoid.
        limit: the largest gate, and the largest magnitude of up, at least 0.
        up_offset: added to up.
        interleaved: whether a packed gate holds pairs (gate, up, gate, up) instead of halves.

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument is of another type, or gate or up is not floating point.
        ValueError: limit is negative, gate and up differ in shape, the width of a packed gate is
            odd, or up is given where gate is interleaved.

    Example:
        >>> pairs = torch.tensor([9.0, -9.0, 1.0, 1.0])
        >>> liger_ops.nn.ClampedSwiGLU(interleaved=True)(pairs)
        tensor([-41.9997,   1.6916])
    """

    def __init__(
        self,
        alpha: float = 1.702,
        limit: float = 7.0,
        up_offset: float = 1.0,
        interleaved: bool = False,
    ) -> None:
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
    """The activation of a gated MLP with GELU, by `liger_ops.geglu`: no parameters.

        y = gelu(gate) * up

    Precision and gradient are those of `liger_ops.geglu`.

    Args:
        approximate: "tanh" or "none", as in `torch.nn.GELU`.

    Shape:
        gate, up: (..., N) each, floating point, any strides; or gate alone, packed, (..., 2N).
        y: (..., N), contiguous.

    Raises:
        TypeError: an argument is of another type, or gate or up is not floating point.
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
    """The square of the rectified input, by `liger_ops.relu_squared`.

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


class Rope(nn.Module):
    """Rotary position embedding of queries and keys, by `liger_ops.rope`.

    It applies the tables cos and sin that a model's rotary embedding makes. Layout, precision and
    gradient are those of `liger_ops.rope`.

    Args:
        interleaved: whether the elements of a pair are next to each other (GPT-J, GLM4, Cohere), or
            in the two halves of a head (Llama and most others).

    Shape:
        q: (B, heads, S, D); k: (B, heads of k, S, D); cos, sin: (S, R), (1, S, R) or (B, S, R) with
            R even and at most D; floating point, any strides. The results: as q and k.

    Raises:
        TypeError: a tensor is not floating point, or k is of another dtype than q.
        ValueError: a shape is not as above.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.nn.Rope()(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
    """

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"


class Softmax(nn.Softmax):
    """`torch.nn.Softmax` by `liger_ops.softmax`, whose precision and gradient it has.

    Args:
        dim: the dimension of which each slice sums to one. The last is fast; any other is moved
            there and back.

    Shape:
        input: any with this dimension, floating point, any strides; the output: the same.

    Raises:
        TypeError: dim is not an int, or input is not floating point.
        ValueError: input has no such dimension.

    Example:
        >>> liger_ops.nn.Softmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("Softmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _over_dim("Softmax", softmax, input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax` by `liger_ops.log_softmax`, whose precision and gradient it has.

    Args:
        dim: the dimension of which each slice's exponentials sum to one. The last is fast; any
            other is moved there and back.

    Shape:
        input: any with this dimension, floating point, any strides; the output: the same.

    Raises:
        TypeError: dim is not an int, or input is not floating point.
        ValueError: input has no such dimension.

    Example:
        >>> liger_ops.nn.LogSoftmax()(torch.tensor([[0.0, 0.0, -torch.inf]]))
        tensor([[-0.6931, -0.6931,    -inf]])
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        _check_dim("LogSoftmax", dim)
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _over_dim("LogSoftmax", log_softmax, input, self.dim)


def _check_dim(owner: str, dim: int) -> None:
    if not isinstance(dim, Integral):
        raise TypeError(f"{owner}: dim must be an int, got {type(dim).__name__}")


def _over_dim(owner: str, op: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """An op of the last dimension, along another."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{owner}: dim must be one of input's {x.dim()} dimensions, got {dim}")
    if dim in (-1, x.dim() - 1):
        return op(x)
    return op(x.transpose(dim, -1)).transpose(dim, -1)


def _check_size(owner: str, name: str, size: int) -> None:
    if not isinstance(size, Integral):
        raise TypeError(f"{owner}: {name} must be an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {size}")
