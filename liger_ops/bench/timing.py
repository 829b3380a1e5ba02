"""Times: on the device by its events, providers interleaved; on the host by its clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .device import Accelerator, Event
from .providers import one_line

Clock = Callable[[], float]
# It prepares, and returns what is timed.
Prepare = Callable[[], Callable[[], Any]]

WARM_UPS = 3
FEWEST_ROUNDS = 5
BURSTS = 11
CALLS_OF_A_BURST = 30


@dataclass(frozen=True)
class Spread:
    """The median, and the percentiles 20 and 80."""

    p50: float
    p20: float
    p80: float

    def map(self, function: Callable[[float], float]) -> Spread:
        """Of a rate, the percentiles change places."""
        low, high = sorted((function(self.p20), function(self.p80)))
        return Spread(function(self.p50), low, high)


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]
    return Spread(at(0.5), at(0.2), at(0.8))


@dataclass(frozen=True)
class Effort:
    """How often a call is timed: `rounds` times, fewer where `seconds` a provider are over."""

    rounds: int = 25
    seconds: float = 2.0


def interleaved(
    accelerator: Accelerator,
    prepares: Mapping[str, Prepare],
    effort: Effort,
    clock: Clock = time.perf_counter,
) -> tuple[dict[str, Spread], dict[str, str]]:
    """Milliseconds of each call on the device, and what failed, in a line.

    In every round each call runs once, the cache flushed before it, in an order that turns from
    round to round: what changes during the measurement, a clock rate or a neighbour, changes for
    all.
    """
    failures: dict[str, str] = {}
    running = dict(prepares)

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            failures[name] = one_line(error)
            del running[name]
            return None

    for name, prepare in prepares.items():
        attempt(name, partial(_warm_up, accelerator, prepare))
    times: dict[str, list[float]] = {name: [] for name in running}
    began = clock()
    allowed = effort.seconds * len(running)
    for turn in range(effort.rounds):
        if turn >= FEWEST_ROUNDS and clock() - began > allowed:
            break
        names = list(running)
        if not names:
            break
        first = turn % len(names)
        events = {}
        for name in names[first:] + names[:first]:
            sample = attempt(name, partial(_sample, accelerator, running[name]))
            if sample is not None:
                events[name] = sample
        accelerator.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end))
    return {name: spread(times[name]) for name in running if times[name]}, failures


def _warm_up(accelerator: Accelerator, prepare: Prepare) -> None:
    for _ in range(WARM_UPS):
        prepare()()
    accelerator.synchronize()


def _sample(accelerator: Accelerator, prepare: Prepare) -> tuple[Event, Event]:
    timed = prepare()
    start, end = accelerator.event(), accelerator.event()
    accelerator.flush_cache()
    accelerator.head_start()
    start.record()
    timed()
    end.record()
    return start, end


def host_microseconds(
    accelerator: Accelerator, function: Callable[[], Any], clock: Clock = time.perf_counter
) -> Spread:
    """What a call costs the host, of bursts that the device can queue."""
    _warm_up(accelerator, lambda: function)
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BURSTS):
            accelerator.synchronize()
            began = clock()
            for _ in range(CALLS_OF_A_BURST):
                function()
            times.append((clock() - began) / CALLS_OF_A_BURST * 1e6)
    finally:
        if collecting:
            gc.enable()
    accelerator.synchronize()
    return spread(times)
