"""Dynamic Tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ..tensors import widened


@library.define(axes="x=* n, alpha=1, gamma=n, beta=n -> y=* n")
def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    """Apply Dynamic Tanh, an elementwise function that replaces a norm over the last dimension.

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
        ValueError: alpha does not have one element, gamma or beta is not (N,), or the devices
            differ.

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


def _scalar(alpha: Tensor, wide: Tensor) -> Tensor:
    return alpha.reshape(()).to(wide.dtype)


dyt_backward = library.derive_backward(
    "dyt", "dy x alpha gamma beta output_mask -> dx dalpha dgamma dbeta"
)
