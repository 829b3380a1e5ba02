"""The processes of a report share a GPU: one of them runs on it at a time, and others compile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ...torch_private import compilation_callbacks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_TURNS = fcntl is not None
# What these are said to compile runs nothing on the GPU; to record a CUDA graph does.
TRIGGERS = ("DYNAMO", "LAZY_BACKWARD")


class Turn:
    """The turn of this process on a GPU, as a lock of a file: from `with` to its end, but not while
    torch.compile compiles.

    Args:
        file: the lock of the GPU.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")
        self._waited = 0.0
        self._is_taken = False
        compilation_callbacks.register_start_callback(self._begin_compilation)
        compilation_callbacks.register_end_callback(self._end_compilation)

    def __enter__(self) -> None:
        self._take()
        self._is_taken = True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False
        self._give()

    def clock(self) -> float:
        """Return a time in seconds, without those in which this process waited for its turn."""
        return time.perf_counter() - self._waited

    def _take(self) -> None:
        began = time.perf_counter()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._waited += time.perf_counter() - began

    def _give(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _begin_compilation(self, args: Any) -> None:
        if self._is_taken and args.callback_trigger.name in TRIGGERS:
            self._give()

    def _end_compilation(self, args: Any) -> None:
        if self._is_taken and args.callback_trigger.name in TRIGGERS:
            self._take()
