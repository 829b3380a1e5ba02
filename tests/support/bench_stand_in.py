"""A CPU as a stand-in for an accelerator, and a manual clock, to test the bench's logic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from liger_ops.bench.timing import Accelerator


class ManualClock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CpuStandIn(Accelerator):
    """A stand-in that lists its calls in `log`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__("cpu", clock)
        self.log: list[str] = []
        self.lost = False

    @property
    def name(self) -> str:
        return "a CPU in the place of a GPU"

    def synchronize(self) -> None:
        self.log.append("synchronize")
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def flush_cache(self) -> None:
        self.log.append("flush")

    def head_start(self) -> None:
        self.log.append("head start")

    def free_memory(self) -> int:
        return 2**20

    def release_memory(self) -> None:
        self.log.append("release")

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        call()
        return 3 * 2**20

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        function()
        return function
