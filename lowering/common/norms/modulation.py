"""The modulation of a norm, y * (1 + scale) + shift, as arguments of every device's kernels.

A sample has one scale and one shift, for all of its rows. In the backward there are two cases. If
samples have several rows, each sample is a norm by itself with the weight (weight + offset) *
(1 + scale), and the gradients of weight, bias, scale and shift follow from its sums: `PerSample`.
If each row is a sample, its scale is read with the row: `PerToken`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....ops.norms.modulation import samples_of


class Modulation(NamedTuple):
    """scale and shift as (samples, N), each row for `tokens` rows of x; `rounds`: every operation
    rounds as PyTorch does. All None: no modulation."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    tokens: int | None = None
    rounds: bool = True

    @property
    def strides(self) -> tuple[int | None, int | None]:
        """The distances between the rows of scale and shift."""
        scale, shift = self.scale, self.shift
        return (
            None if scale is None else scale.stride(0),
            None if shift is None else shift.stride(0),
        )


PLAIN = Modulation()


def modulation_of(call: Any, rows: Callable[[Tensor], Tensor]) -> Modulation:
    """Return the modulation of a forward call; rows(tensor) returns a tensor as (M, N)."""
    scale = rows(call.scale)
    shift = None if call.shift is None else rows(call.shift)
    return Modulation(scale, shift, tokens_of(call), call.casting_mode != "float32")


def tokens_of(call: Any) -> int:
    """Return the number of rows of a sample."""
    return call.x.numel() // call.x.shape[-1] // samples_of(call.scale)


class PerSample(NamedTuple):
    """The backward of a norm of each sample by itself, with a weight of its own: a row of
    `weights`, which are (weight + offset) * (1 + scale), (samples, N) float32.

    The norm's backward fills `products` and `sums`, (samples, N), with the sums over a sample's
    rows of dy * xhat, and of dy. Each is None if it is not wanted. The gradients of weight, bias,
    scale and shift follow from them.
    """

    weights: Tensor
    products: Tensor | None
    sums: Tensor | None


class PerToken(NamedTuple):
    """The backward of a norm with a row of scale, (M, N), for each row of x: dy * (1 + scale) is
    the gradient of the norm's result, and dscale is dy times that result, or None if not wanted.
    """

    scale: Tensor
    dscale: Tensor | None
    bias: Tensor | None


class Gradients(NamedTuple):
    """The gradients of a modulated norm, to be filled; None if not wanted."""

    dx: Tensor | None
    dscale: Tensor | None
    dshift: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None = None


def launch_backward(
    call: Any, wanted: Gradients, bias: Tensor | None, offset: float,
    rows: Callable[[Tensor], Tensor], launch: Callable[[PerSample | PerToken], None],
) -> None:  # fmt: skip
    """Fill the gradients of a modulated norm. `launch` launches the norm's backward."""
    if call.x.numel() == 0:
        for gradient in wanted:
            if gradient is not None:
                gradient.zero_()
    elif tokens_of(call) == 1:
        if wanted.dshift is not None:
            wanted.dshift.copy_(call.dy.reshape(wanted.dshift.shape))
        if any(gradient is not None for gradient in wanted._replace(dshift=None)):
            dscale = None if wanted.dscale is None else wanted.dscale.view(-1, call.x.shape[-1])
            launch(PerToken(rows(call.scale), dscale, bias))
    else:
        _launch_per_sample(call, wanted, bias, offset, launch)


def _launch_per_sample(
    call: Any, wanted: Gradients, bias: Tensor | None, offset: float,
    launch: Callable[[PerSample | PerToken], None],
) -> None:  # fmt: skip
    shape = (samples_of(call.scale), call.x.shape[-1])
    factor = call.scale.reshape(shape).to(torch.float32) + 1.0
    weight = None if call.weight is None else call.weight.to(torch.float32) + offset
    weights = factor if weight is None else factor * weight
    plain = weight is None and bias is None
    # The sums are kept in float32 where other gradients follow from them. Where none do, the kernel
    # stores them as dscale (without a weight or bias) or dshift itself, rounded once.
    keeps_products = wanted.dweight is not None or (wanted.dscale is not None and not plain)
    keeps_sums = wanted.dbias is not None or (wanted.dscale is not None and bias is not None)
    products = torch.empty_like(factor) if keeps_products else _reshaped(wanted.dscale, shape)
    sums = torch.empty_like(factor) if keeps_sums else _reshaped(wanted.dshift, shape)
    launch(PerSample(weights, products, sums))
    if products is not None and keeps_products:
        if wanted.dscale is not None:
            dscale = products if weight is None else products * weight
            if bias is not None and sums is not None:
                dscale = torch.addcmul(dscale, sums, bias.to(torch.float32))
            wanted.dscale.copy_(dscale.reshape(wanted.dscale.shape))
        if wanted.dweight is not None:
            wanted.dweight.copy_((products * factor).sum(0))
    if sums is not None and keeps_sums:
        if wanted.dshift is not None:
            wanted.dshift.copy_(sums.reshape(wanted.dshift.shape))
        if wanted.dbias is not None:
            wanted.dbias.copy_((sums * factor).sum(0))


def _reshaped(gradient: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if gradient is None else gradient.view(shape)
