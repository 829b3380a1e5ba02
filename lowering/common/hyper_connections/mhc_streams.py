"""Register mhc_pre and mhc_post_res with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .... import library
from ..tensors import contiguous, streams_of


def register(device: str, launch: Callable[..., None]) -> None:
    """Register a device's launch(op, x, plan, *tensors), where x is (M, hc, C), and `tensors` are
    the kernel's arguments: contiguous, and the results last."""
    module = launch.__module__

    @library.kernel("mhc_pre", device, module=module)
    def pre(call, y, plan):
        x = streams_of(call.x)
        launch("mhc_pre", x, plan, x, call.h_pre.contiguous(), y)

    @library.kernel("mhc_pre_backward", device, module=module)
    def pre_backward(call, dx, dh_pre, plan):
        x, others = streams_of(call.x), (call.h_pre.contiguous(), dx, dh_pre)
        launch("mhc_pre_backward", x, plan, call.dy.contiguous(), x, *others)

    @library.kernel("mhc_post_res", device, module=module)
    def post_res(call, y, plan):
        x, others = streams_of(call.x), map(contiguous, (call.f_out, call.h_post, call.h_res))
        launch("mhc_post_res", x, plan, x, *others, y)

    @library.kernel("mhc_post_res_backward", device, module=module)
    def post_res_backward(call, *gradients_and_plan):
        *gradients, plan = gradients_and_plan
        x, others = streams_of(call.x), map(contiguous, (call.f_out, call.h_post, call.h_res))
        tensors = (call.dy.contiguous(), x, *others, *gradients)
        launch("mhc_post_res_backward", x, plan, *tensors)
