"""The backward of rms_norm and layer_norm, as every algorithm for it is called on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..tensors import contiguous
from .modulation import PerSample, PerToken


class NormArguments(NamedTuple):
    """Arguments of the backward of a norm. A tensor is None if it is absent or not wanted.

    dy, ds and x are rows, (M, N), as the device's `rows` makes them; the others are contiguous.
    There are `samples` norms, one after the other, of as many rows each: weight, dweight and dbias
    then have a row for each of them. `token` is a modulation of each row. layer_norm has a mean,
    and rms_norm has none.
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
    has_mean: bool
    samples: int = 1
    token: PerToken | None = None
    is_modulated: bool = False

    @property
    def tokens(self) -> int:
        """The rows of a sample."""
        return self.x.shape[0] // self.samples

    @property
    def rows_of_weight(self) -> int | None:
        """How many rows of x a row of weight is for, or None if there is one row of weight."""
        return None if self.samples == 1 else self.tokens


def backward_of(
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor], call: Any,
    ds: Tensor | None, x: Tensor, *gradients: Tensor | None, has_mean: bool,
) -> NormArguments:  # fmt: skip
    """The backward of a norm; the gradients are dx, dweight and dbias."""
    tensors = (rows(call.dy), None if ds is None else rows(ds), rows(x), contiguous(call.weight))
    offset = 0.0 if has_mean else call.offset
    return norm(*tensors, *gradients, call.eps, offset, has_mean)


def modulated(
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor], call: Any,
    form: PerSample | PerToken, *gradients: Tensor | None, has_mean: bool,
) -> NormArguments:  # fmt: skip
    """The backward of a modulated norm."""
    if isinstance(form, PerToken):
        found = backward_of(norm, rows, call, None, call.x, *gradients, has_mean=has_mean)
        token = form._replace(bias=contiguous(form.bias))
        return found._replace(token=token, is_modulated=True)
    tensors = (rows(call.dy), None, rows(call.x), form.weights, gradients[0])
    options = (call.eps, 0.0, has_mean, form.weights.shape[0], None, True)
    return norm(*tensors, form.products, form.sums, *options)
