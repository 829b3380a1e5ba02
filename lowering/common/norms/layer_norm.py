"""Register layer_norm and modulated_layer_norm with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .... import library
from .backward import NormArguments, backward_of, modulated
from .modulation import Gradients, launch_backward, modulation_of


def register(
    device: str, launch: Callable[..., None], launch_norm_backward: Callable[..., None],
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Register a device's launch(call, y, plan, modulation) and launch_norm_backward(norm, plan).

    `norm` is the device's class of the backward's arguments, and rows(tensor) returns a tensor as
    (M, N).
    """
    module = launch.__module__

    @library.kernel("layer_norm", device, module=module)
    def layer_norm(call, y, plan):
        launch(call, y, plan)

    @library.kernel("layer_norm_backward", device, module=module)
    def layer_norm_backward(call, dx, dweight, dbias, plan):
        tensors = (None, call.x, dx, dweight, dbias)
        launch_norm_backward(backward_of(norm, rows, call, *tensors, has_mean=True), plan)

    @library.kernel("modulated_layer_norm", device, module=module)
    def modulated_layer_norm(call, y, plan):
        if y.numel():
            launch(call, y, plan, modulation_of(call, rows))

    @library.kernel("modulated_layer_norm_backward", device, module=module)
    def modulated_layer_norm_backward(call, dx, dscale, dshift, dweight, dbias, plan):
        gradients = Gradients(dx, dscale, dshift, dweight, dbias)

        def backward(form):
            tensors = (form, dx, dweight, dbias)
            launch_norm_backward(modulated(norm, rows, call, *tensors, has_mean=True), plan)

        launch_backward(call, gradients, call.bias, 0.0, rows, backward)
