"""Register rms_norm and fused_add_rms_norm with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .. import library


def register(
    device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register launch(call, residual, y, s, plan) and launch_backward(call, ds, x or s, dx,
    dweight, plan) of a device. residual, s and ds are None in rms_norm."""
    module = launch.__module__

    @library.kernel("rms_norm", device, module=module)
    def rms_norm(call, y, plan):
        launch(call, None, y, None, plan)

    @library.kernel("fused_add_rms_norm", device, module=module)
    def fused_add_rms_norm(call, y, s, plan):
        launch(call, call.residual, y, s, plan)

    @library.kernel("rms_norm_backward", device, module=module)
    def rms_norm_backward(call, dx, dweight, plan):
        launch_backward(call, None, call.x, dx, dweight, plan)

    @library.kernel("fused_add_rms_norm_backward", device, module=module)
    def fused_add_rms_norm_backward(call, dx, dweight, plan):
        launch_backward(call, call.ds, call.s, dx, dweight, plan)
