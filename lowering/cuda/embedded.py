"""Trace launches as nodes of a graph, for the kernels in a package of AOTInductor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch.library import wrap_triton

from . import launch
from .compiled import thread

# Options that Triton takes and Inductor does not: it compiles the kernels of a package without
# dependent launches, and with assertions.
DROPPED_OPTIONS = ("launch_pdl", "debug", "sanitize_overflow")

_lock = threading.Lock()


@contextlib.contextmanager
def traced_launches() -> Iterator[None]:
    """Let make_fx trace the launches of this thread."""
    launch_compiled = launch.launch_compiled

    def trace(
        kernel: Any, grid: tuple[int, ...], device: int | None,
        args: tuple[Any, ...], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        # The replacement is seen by every thread, and only this one traces.
        if not thread.is_traced:
            return launch_compiled(kernel, grid, device, args, constants)
        constants = {
            name: value for name, value in constants.items() if name not in DROPPED_OPTIONS
        }
        if "DEPENDENT" in constants:
            # Without a dependent launch, there is nothing for the kernel to wait for.
            constants["DEPENDENT"] = False
        wrap_triton(kernel)[grid](*args, **constants)

    with _lock:
        launch.launch_compiled, thread.is_traced = trace, True
        try:
            yield
        finally:
            launch.launch_compiled, thread.is_traced = launch_compiled, False
