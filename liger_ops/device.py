"""The device type that scripts use, and how long a step takes on a device, with what memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .ascend.cures import explained

PREFERENCE = ("cuda", "npu", "xpu")
MIB = 2**20
# A call is timed at least so often, however long it takes.
FEWEST_ROUNDS = 5

Clock = Callable[[], float]


def infer_device() -> str:
    """Return the first of "cuda", "npu" and "xpu" that PyTorch can use on this machine, or "cpu".

    It is for scripts that choose a device. The ops do not call it: an op runs on its tensors'
    device.

    Raises:
        ImportError: torch_npu is installed and does not load. The message says why, and the cure.
    """
    import_torch_npu()
    for device in PREFERENCE:
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            return device
    return "cpu"


def import_torch_npu() -> None:
    """Import torch_npu, which defines torch.npu, if it is installed.

    Raises:
        ImportError: it does not load. The message says why, and the cure.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            raise ImportError(f"torch_npu does not load: {explained(error)}") from error


@dataclass(frozen=True)
class Spread:
    """The median, and the 20th and 80th percentiles."""

    p50: float
    p20: float
    p80: float

    def map(self, function: Callable[[float], float]) -> Spread:
        """Apply a function to all three values; a decreasing one swaps the percentiles."""
        low, high = sorted((function(self.p20), function(self.p80)))
        return Spread(function(self.p50), low, high)


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]
    return Spread(at(0.5), at(0.2), at(0.8))


@dataclass(frozen=True)
class Effort:
    """The number of times that a call is timed: `rounds`, or fewer after `seconds`."""

    rounds: int = 25
    seconds: float = 2.0

    def is_spent(self, rounds: int, seconds: float) -> bool:
        """Return whether no further round begins after these rounds and seconds."""
        return rounds >= self.rounds or (rounds >= FEWEST_ROUNDS and seconds > self.seconds)


@dataclass
class HostEvent:
    """An event of the host's clock, with the interface of a device's events."""

    clock: Clock
    at: float = 0.0

    def record(self) -> None:
        self.at = self.clock()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


class MeasuredDevice:
    """A device whose steps are measured: by its events and its allocator's statistics, or on a CPU
    by the host's clock and the profiler."""

    def __init__(self, kind: str, clock: Clock = time.perf_counter) -> None:
        self.kind, self.clock = kind, clock
        self.module: Any = None if kind == "cpu" else torch.get_device_module(kind)

    @property
    def name(self) -> str:
        return "the CPU" if self.module is None else str(self.module.get_device_name())

    def event(self) -> Any:
        if self.module is None:
            return HostEvent(self.clock)
        return self.module.Event(enable_timing=True)

    def recorded(self) -> Any:
        """Return an event that has been recorded."""
        event = self.event()
        event.record()
        return event

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def times(
        self, step: Callable[[], Any], effort: Effort, before: Callable[[], Any] | None = None
    ) -> list[float]:
        """Return the milliseconds of each step.

        Args:
            step: what is timed. The caller runs the steps that warm it up.
            effort: how many steps.
            before: runs before every step, is not timed, and leaves the device idle. Without it the
                steps follow each other, and each lasts from the end of the one before it.
        """
        events: list[tuple[Any, Any]] = []
        self.synchronize()
        began, end = self.clock(), self.recorded()
        while not effort.is_spent(len(events), self.clock() - began):
            begin = end
            if before is not None:
                before()
                begin = self.recorded()
            step()
            end = self.recorded()
            events.append((begin, end))
        self.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """Return the peak memory of a call above what was allocated before it."""
        if self.module is None:
            return peak_of(events_of(call, memory=True))
        self.synchronize()
        before = self.module.memory_allocated()
        self.module.reset_peak_memory_stats()
        call()
        self.synchronize()
        return int(self.module.max_memory_allocated() - before)

    def consecutive(
        self, step: Callable[[], Any], steps: int, warm_ups: int = 0
    ) -> tuple[Spread, int]:
        """Measure the milliseconds of a step among steps that follow each other, and the bytes that
        are allocated at their peak. On a CPU these are one more step's `peak_bytes`."""
        for _ in range(warm_ups):
            step()
        self.synchronize()
        if self.module is not None:
            self.module.reset_peak_memory_stats()
        times = self.times(step, Effort(steps, seconds=float("inf")))
        on_cpu = self.module is None
        peak = self.peak_bytes(step) if on_cpu else int(self.module.max_memory_allocated())
        return spread(times), peak


def events_of(call: Callable[[], object], memory: bool) -> list[Any]:
    """Return the events of a call on the CPU in their order, with those of memory if asked for."""
    # Otherwise the profiler writes two lines to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=memory) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    return sorted(events, key=lambda event: event.start_ns())


def peak_of(events: Iterable[Any]) -> int:
    """Return the most bytes that are held at any of these events."""
    held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    return max(held, default=0)
