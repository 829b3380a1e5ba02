"""softmax and log_softmax, by a device's kernels."""

from __future__ import annotations

from collections.abc import Callable

from .. import library


def register(
    device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register the launches of a device's kernels: of x and y, and of dy, y and dx; then whether of
    log_softmax, and the plan."""
    for name in ("softmax", "log_softmax"):
        _register(name, device, launch, launch_backward)


def _register(
    name: str, device: str, launch: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    log, module = name == "log_softmax", launch.__module__

    @library.kernel(name, device, module=module)
    def forward(call, y, plan):
        launch(call.x, y, log, plan)

    @library.kernel(f"{name}_backward", device, module=module)
    def backward(call, dx, plan):
        launch_backward(call.dy, call.y, dx, log, plan)
