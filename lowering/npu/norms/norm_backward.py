"""The backward of rms_norm and layer_norm, as every algorithm for it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ...common.norms.modulation import PerSample, PerToken
from ...common.sizes import cdiv
from ...common.tensors import contiguous
from .. import tiling
from ..tiling import Plan


class NormBackward(NamedTuple):
    """Arguments of the backward of a norm. A tensor is None if it is absent or not wanted.

    All tensors are contiguous; dy, ds, x and dx are (M, N). There are `samples` norms, one after
    the other, of as many rows each: weight, dweight and dbias then have a row for each of them.
    `token` is a modulation of each row.
    """

    dy: Tensor
    ds: Tensor | None
    x: Tensor
    weight: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    eps: float
    offset: float
    samples: int = 1
    token: PerToken | None = None

    @property
    def tokens(self) -> int:
        """The rows of a sample."""
        return self.x.shape[0] // self.samples

    @property
    def rows_of_weight(self) -> int | None:
        """How many rows of x a row of weight is for, or None if there is one row of weight."""
        return None if self.samples == 1 else self.tokens

    @property
    def scale(self) -> Tensor | None:
        return None if self.token is None else self.token.scale

    def plan(self, op: str, forced: Plan | None) -> Plan:
        """The plan for the op, or the forced one; without kept rows if there are several samples or
        modulations."""
        if forced is not None:
            several = self.samples > 1 or self.token is not None
            return replace(forced, KEPT=0) if several else forced
        gradients = (self.dweight, self.dbias)
        tensors = (self.x, self.dy, self.scale)
        N = self.x.shape[1]
        return tiling.plan(op, N, *tensors, weights=(self.weight,), gradients=gradients)

    def splits(self, plan: Plan) -> int:
        """How many programs share the rows of a sample, so that every core has work."""
        tiles = cdiv(self.tokens, plan.BLOCK_M)
        return max(1, min(tiles, plan.cores // self.samples))

    def items(self, splits: int) -> tuple[int | None, int | None]:
        """The numbers of samples and splits, or None if a program has one item."""
        return (None, None) if self.samples == 1 else (self.samples, splits)


def modulated_backward(
    call: Any, form: PerSample | PerToken, dx: Tensor | None, dweight: Tensor | None,
    dbias: Tensor | None, offset: float,
) -> NormBackward:  # fmt: skip
    """The backward of a modulated norm."""
    dy, x = tiling.rows(call.dy), tiling.rows(call.x)
    if isinstance(form, PerToken):
        tensors = (dy, None, x, contiguous(call.weight), dx, dweight, dbias)
        token = form._replace(bias=contiguous(form.bias))
        return NormBackward(*tensors, call.eps, offset, token=token)
    tensors = (dy, None, x, form.weights, dx, form.products, form.sums)
    return NormBackward(*tensors, call.eps, 0.0, samples=form.weights.shape[0])
