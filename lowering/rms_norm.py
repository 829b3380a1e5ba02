"""rms_norm and fused_add_rms_norm, by a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .. import library


def register(device: str, forward: Callable[..., None], backward: Callable[..., None]) -> None:
    """Register the launches of a device's kernels, which take a residual and its gradient or None:
    of x, residual, weight, y, s, eps, offset, casting_mode and plan; and of dy, ds, x or s, weight,
    dx, dweight, eps, offset and plan."""

    @library.kernel("rms_norm", device, module=forward.__module__)
    def rms_norm(call, y, plan):
        options = (call.eps, call.offset, call.casting_mode)
        forward(call.x, None, call.weight, y, None, *options, plan)

    @library.kernel("fused_add_rms_norm", device, module=forward.__module__)
    def fused_add_rms_norm(call, y, s, plan):
        options = (call.eps, call.offset, call.casting_mode)
        forward(call.x, call.residual, call.weight, y, s, *options, plan)

    @library.kernel("rms_norm_backward", device, module=backward.__module__)
    def rms_norm_backward(call, dx, dweight, plan):
        options = (call.eps, call.offset)
        backward(call.dy, None, call.x, call.weight, dx, dweight, *options, plan)

    @library.kernel("fused_add_rms_norm_backward", device, module=backward.__module__)
    def fused_add_rms_norm_backward(call, dx, dweight, plan):
        options = (call.eps, call.offset)
        backward(call.dy, call.ds, call.s, call.weight, dx, dweight, *options, plan)
