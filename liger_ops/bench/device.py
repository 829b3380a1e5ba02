"""The accelerator that is measured: its events, its memory, its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device import infer_device

KINDS = ("cuda", "npu")

# More than the last level of cache of any device that there is.
CACHE_BYTES = 256 * 2**20
# Longer than the host takes for any call that is limited by it: 2 ms at 2 GHz.
HEAD_START_CYCLES = 4_000_000
# Where there is no sleep on the device, it writes: some 0.2 ms each.
HEAD_START_FLUSHES = 10
MB = 2**20


class NoAccelerator(Exception):
    """Why nothing can be measured, in one sentence."""


class Event(Protocol):
    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float: ...


class Accelerator:
    """A GPU through torch.cuda, or an Ascend NPU through torch.npu, which has the same interface.

    The NPU's side has not been run on an Ascend device.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module: Any = getattr(torch, kind)
        self._cache_filler: Tensor | None = None

    @property
    def name(self) -> str:
        return str(self.module.get_device_name())

    def event(self) -> Event:
        return self.module.Event(enable_timing=True)

    def synchronize(self) -> None:
        self.module.synchronize()

    def flush_cache(self) -> None:
        if self._cache_filler is None:
            self._cache_filler = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.kind)
        self._cache_filler.zero_()

    def head_start(self) -> None:
        """Keep the device busy while the host queues the call that is timed."""
        if hasattr(self.module, "_sleep"):
            self.module._sleep(HEAD_START_CYCLES)
        else:
            for _ in range(HEAD_START_FLUSHES):
                self.flush_cache()

    def free_memory(self) -> int:
        return int(self.module.mem_get_info()[0])

    def release_memory(self) -> None:
        self.module.empty_cache()

    def peak_memory(self, function: Callable[[], Any]) -> float:
        """What a call allocates at its peak beyond what is there before it, in MB."""
        self.synchronize()
        before = self.module.memory_allocated()
        self.module.reset_peak_memory_stats()
        function()
        self.synchronize()
        return (self.module.max_memory_allocated() - before) / MB

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The replay of a graph of the call."""
        # Kernels compile, and libraries allocate, before the capture and on its own stream.
        stream = self.module.Stream()
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            for _ in range(3):
                function()
        self.module.current_stream().wait_stream(stream)
        graph = getattr(self.module, "CUDAGraph" if self.kind == "cuda" else "NPUGraph")()
        with self.module.graph(graph):
            # What is kept is alive as long as the graph, which writes to it.
            kept = function()
        return lambda: (graph.replay(), kept)


def find(kind: str | None) -> Accelerator:
    """The accelerator of a kind, or of this machine.

    Raises:
        NoAccelerator: there is none.
    """
    best = infer_device()
    if kind is None:
        if best not in KINDS:
            raise NoAccelerator("PyTorch finds no GPU and no NPU on this machine")
        return Accelerator(best)
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise NoAccelerator(f"PyTorch finds no {kind} device on this machine")
    return Accelerator(kind)
