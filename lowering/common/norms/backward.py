"""Arguments of the backward of rms_norm and layer_norm, for every algorithm on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..tensors import contiguous
from .modulation import PerSample, PerToken


class NormArguments(NamedTuple):
    """Arguments of the backward of a norm. A tensor is None if it is absent or not wanted.

    dy, ds and x are (M, N), as the device's `rows` returns them; the other tensors are contiguous.
    The rows belong to `samples` norms, one after the other, with as many rows each. With more than
    one, weight, dweight and dbias have a row for each sample. `token` is a modulation with a scale
    for each row. `has_mean`: layer_norm subtracts a mean, rms_norm does not.
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
        """The rows of x that share a row of weight, or None if weight has a single row."""
        return None if self.samples == 1 else self.tokens


def backward_of(
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor], call: Any,
    ds: Tensor | None, x: Tensor, *gradients: Tensor | None, has_mean: bool,
) -> NormArguments:  # fmt: skip
    """Return the arguments of a norm's backward; `gradients` are dx, dweight and dbias."""
    tensors = (rows(call.dy), None if ds is None else rows(ds), rows(x), contiguous(call.weight))
    offset = 0.0 if has_mean else call.offset
    return norm(*tensors, *gradients, call.eps, offset, has_mean)


def modulated(
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor], call: Any,
    form: PerSample | PerToken, *gradients: Tensor | None, has_mean: bool,
) -> NormArguments:  # fmt: skip
    """Return the arguments of a modulated norm's backward, in one of the two forms that
    `modulation.launch_backward` chooses; `gradients` are dx, dweight and dbias."""
    if isinstance(form, PerToken):
        arguments = backward_of(norm, rows, call, None, call.x, *gradients, has_mean=has_mean)
        token = form._replace(bias=contiguous(form.bias))
        return arguments._replace(token=token, is_modulated=True)
    # The form's weights have the offset in them: it is 0 for the kernel.
    tensors = (rows(call.dy), None, rows(call.x), form.weights, gradients[0])
    options = (call.eps, 0.0, has_mean, form.weights.shape[0], None, True)
    return norm(*tensors, form.products, form.sums, *options)
