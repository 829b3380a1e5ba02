"""Register kl_div, jsd and tvd with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.losses import jsd, kl_div, tvd
from ....ops.losses.distribution_loss import DistributionLoss
from ..tensors import flat

FORMS: dict[str, Callable[[Any], DistributionLoss]] = {
    "kl_div": kl_div.form, "jsd": jsd.form, "tvd": tvd.form,
}  # fmt: skip


def register(
    device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register the functions that launch a device's kernels:

        launch(form, within, loss, plan)
        launch_backward(form, within, grad, dx, dy, plan)

    form: the op's inputs and options, a `DistributionLoss`. within: (M,), 1.0 for rows that count,
    else 0.0; or None. loss: (M, V) for the reduction "none", else (M,) for the sum of each row.
    grad: (M, V) of any strides for the reduction "none", else () with the reduction's factor
    included.
    """
    for name, form_of in FORMS.items():

        @library.kernel(name, device, module=launch.__module__)
        def forward(call, loss, plan, form_of=form_of):
            form = form_of(call)
            if form.reduction == "none":
                launch(form, _within(form), loss.view(-1, loss.shape[-1]), plan)
                return
            V = form.x.shape[-1]
            of_rows = loss.new_empty(form.x.numel() // V)
            launch(form, _within(form), of_rows, plan)
            torch.sum(of_rows, 0, out=loss)
            loss.div_(form.divisor)

        @library.kernel(f"{name}_backward", device, module=launch.__module__)
        def backward(call, dx, dy, plan, form_of=form_of):
            form, grad = form_of(call), call.dloss
            if form.reduction == "none":
                grad = grad.reshape(-1, grad.shape[-1])
            else:
                grad = grad.float() / form.divisor
            launch_backward(form, _within(form), grad, dx, dy, plan)


def _within(form: DistributionLoss) -> Tensor | None:
    """Return whether each row counts, as float32 of (M,); None if all rows do."""
    return None if form.within is None else flat(form.within).float()
