"""Dynamic Tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ..precision import widened


@library.define(axes="x=* n, alpha=1, gamma=n, beta=n -> y=* n")
def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    """Dynamic Tanh, elementwise in place of a norm over the last dimension.

        y = gamma * tanh(alpha * x) + beta

    y is computed in float32 and rounded once, to x.dtype. The kernels compute tanh to a few units
    in the last place of float32, however small alpha * x is. The gradients of alpha, gamma and beta
    are summed in float32, in an order that does not change between runs. Only the inputs are saved.

    Autocast changes nothing. float64 runs the definition on every device.

    Args:
        x: (..., N), floating point, any strides.
        alpha: a tensor of one element, floating point; its dtype may differ from x's.
        gamma: (N,), floating point; its dtype may differ from x's.
        beta: (N,), floating point; its dtype may differ from x's. None for no shift.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: a shape or a device is not as above.

    Source: Zhu et al., "Transformers without Normalization", 2025.

    Example:
        >>> liger_ops.dyt(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]), torch.tensor([1.0, 3.0]))
        tensor([[0.0000, 2.8921]])
    """
    wide = widened(x)
    y = torch.tanh(_scalar(alpha, wide) * wide) * gamma.to(wide.dtype)
    if beta is not None:
        y = y + beta.to(wide.dtype)
    return y.to(x.dtype).contiguous()


@library.define()
def dyt_backward(
    dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `dyt`.

    With t = tanh(alpha * x) and g = dy * gamma * (1 - t**2):

        dx     = alpha * g
        dalpha = sum(g * x)
        dgamma = sum(dy * t) over all dimensions but the last
        dbeta  = sum(dy) over all dimensions but the last

    Args:
        dy: (..., N), any strides.
        x, alpha, gamma, beta: as given to `dyt`; only beta's dtype is used.
        output_mask: whether dx, dalpha, dgamma and dbeta are computed and allocated.

    Returns:
        dx, dalpha, dgamma and dbeta, contiguous, of the shapes and dtypes of x, alpha, gamma and
        beta; None for each that output_mask leaves out.

    Raises:
        TypeError, ValueError: as `dyt`; or dy does not have x's shape.
    """
    wide = widened(x)
    scale = _scalar(alpha, wide)
    t = torch.tanh(scale * wide)
    dy = dy.to(wide.dtype)
    dx = dalpha = dgamma = dbeta = None
    if output_mask[0] or output_mask[1]:
        g = dy * gamma.to(wide.dtype) * (1 - t * t)
        if output_mask[0]:
            dx = (scale * g).to(x.dtype).contiguous()
        if output_mask[1]:
            dalpha = (g * wide).sum().reshape(alpha.shape).to(alpha.dtype)
    if output_mask[2]:
        dgamma = (dy * t).reshape(-1, x.shape[-1]).sum(0).to(gamma.dtype)
    if output_mask[3] and beta is not None:
        dbeta = dy.reshape(-1, x.shape[-1]).sum(0).to(beta.dtype)
    return dx, dalpha, dgamma, dbeta


def _scalar(alpha: Tensor, wide: Tensor) -> Tensor:
    return alpha.reshape(()).to(wide.dtype)


library.gradient("dyt")
