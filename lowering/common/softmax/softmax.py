"""Register softmax and log_softmax with a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .... import library


def register(
    device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register a device's launch(x, y, log, plan) and launch_backward(dy, y, dx, log, plan); with
    `log` they compute log_softmax."""
    for name in ("softmax", "log_softmax"):
        # A default binds the name of this turn of the loop.
        @library.kernel(name, device, module=launch.__module__)
        def forward(call, y, plan, log=name == "log_softmax"):
            launch(call.x, y, log, plan)

        @library.kernel(f"{name}_backward", device, module=launch.__module__)
        def backward(call, dx, plan, log=name == "log_softmax"):
            launch_backward(call.dy, call.y, dx, log, plan)
