"""softmax and log_softmax, by a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .. import library


def register(device: str, forward: Callable[..., None], backward: Callable[..., None]) -> None:
    """Register the launches of a device's kernels: of x and y, and of dy, y and dx; then whether of
    log_softmax, and the plan."""
    for name in ("softmax", "log_softmax"):
        _register(name, device, forward, backward)


def _register(
    name: str, device: str, forward: Callable[..., None], backward: Callable[..., None]
) -> None:
    log = name == "log_softmax"

    @library.kernel(name, device, module=forward.__module__)
    def launch_forward(call, y, plan):
        forward(call.x, y, log, plan)

    @library.kernel(f"{name}_backward", device, module=backward.__module__)
    def launch_backward(call, dx, plan):
        backward(call.dy, call.y, dx, log, plan)
