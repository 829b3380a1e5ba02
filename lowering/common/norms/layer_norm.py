"""Register layer_norm and modulated_layer_norm with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .... import library
from .modulation import Gradients, launch_backward, modulation_of


def register(
    device: str, launch: Callable[..., None], launch_norm_backward: Callable[..., None],
    launch_modulated_backward: Callable[..., None], rows: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Register launch(call, y, plan, modulation), launch_norm_backward(call, dx, dweight, dbias,
    plan) and launch_modulated_backward(call, PerSample or PerToken, dx, dweight, dbias, plan) of a
    device. `rows` makes a tensor (M, N)."""
    module = launch.__module__

    @library.kernel("layer_norm", device, module=module)
    def layer_norm(call, y, plan):
        launch(call, y, plan)

    @library.kernel("layer_norm_backward", device, module=module)
    def layer_norm_backward(call, dx, dweight, dbias, plan):
        launch_norm_backward(call, dx, dweight, dbias, plan)

    @library.kernel("modulated_layer_norm", device, module=module)
    def modulated_layer_norm(call, y, plan):
        if y.numel():
            launch(call, y, plan, modulation_of(call, rows))

    @library.kernel("modulated_layer_norm_backward", device, module=module)
    def modulated_layer_norm_backward(call, dx, dscale, dshift, dweight, dbias, plan):
        given = Gradients(dx, dscale, dshift, dweight, dbias)

        def backward(form):
            launch_modulated_backward(call, form, dx, dweight, dbias, plan)

        launch_backward(call, given, call.bias, 0.0, rows, backward)
