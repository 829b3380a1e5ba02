"""Register rms_norm, fused_add_rms_norm and modulated_rms_norm with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .... import library
from .backward import NormArguments, backward_of, modulated
from .modulation import Gradients, launch_backward, modulation_of


def rms_mode(casting_mode: str) -> str:
    """Return the casting mode of the kernel: in "float32", the norm rounds as in "gemma"."""
    return "gemma" if casting_mode == "float32" else casting_mode


def register(
    device: str, launch: Callable[..., None], launch_norm_backward: Callable[..., None],
    norm: type[NormArguments], rows: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Register a device's launch(call, residual, y, s, plan, modulation) and
    launch_norm_backward(norm, plan).

    residual and s are None in rms_norm. `norm` is the device's class of the backward's arguments,
    and rows(tensor) returns a tensor as (M, N).
    """
    module = launch.__module__
    backward_of_norm = partial(backward_of, norm, rows, has_mean=False)

    @library.kernel("rms_norm", device, module=module)
    def rms_norm(call, y, plan):
        launch(call, None, y, None, plan)

    @library.kernel("fused_add_rms_norm", device, module=module)
    def fused_add_rms_norm(call, y, s, plan):
        launch(call, call.residual, y, s, plan)

    @library.kernel("rms_norm_backward", device, module=module)
    def rms_norm_backward(call, dx, dweight, plan):
        launch_norm_backward(backward_of_norm(call, None, call.x, dx, dweight, None), plan)

    @library.kernel("fused_add_rms_norm_backward", device, module=module)
    def fused_add_rms_norm_backward(call, dx, dweight, plan):
        launch_norm_backward(backward_of_norm(call, call.ds, call.s, dx, dweight, None), plan)

    @library.kernel("modulated_rms_norm", device, module=module)
    def modulated_rms_norm(call, y, plan):
        if y.numel():
            launch(call, None, y, None, plan, modulation_of(call, rows))

    @library.kernel("modulated_rms_norm_backward", device, module=module)
    def modulated_rms_norm_backward(call, dx, dscale, dshift, dweight, plan):
        gradients = Gradients(dx, dscale, dshift, dweight)

        def backward(form):
            tensors = (form, dx, dweight, None)
            launch_norm_backward(modulated(norm, rows, call, *tensors, has_mean=False), plan)

        launch_backward(call, gradients, None, call.offset, rows, backward)
