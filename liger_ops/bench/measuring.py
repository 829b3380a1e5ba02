"""The order of a run: the device's rates, every workload, and last what the host costs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import rates
from .calls import Call, copied
from .checking import Wrong, check, relative_error
from .device import MB, Accelerator
from .points import COPY, MATRIX_PRODUCT, UNITS, Point, Points
from .providers import MODULES, PROVIDERS, Peers, functions, one_line
from .timing import Clock, Effort, Spread, host_microseconds, interleaved
from .workloads.entry import MODES, Draw, Workload

# Of the host: what a user calls, and what training does.
HOST_MODES = ("forward", "full")


class DeviceLost(Exception):
    """The device answers nothing any more, as after an illegal access."""


@dataclass
class Run:
    """A run over workloads. Its points are all that it has found so far."""

    accelerator: Accelerator
    workloads: Sequence[Workload]
    providers: Sequence[str] = PROVIDERS
    modes: Sequence[str] = MODES
    effort: Effort = Effort()
    # No workload is begun after this many seconds.
    budget: float = float("inf")
    facts: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    peers: Peers = field(default_factory=Peers)
    points: Points = field(default_factory=Points)
    # What the budget did not suffice for.
    left: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[Workload | None]:
        """Measure, and yield when there is more to keep: a workload, where it is done.

        A small one is done twice, the second time with what its host costs.

        Raises:
            DeviceLost: after a failure that the device does not recover from.
        """
        began = self.clock()
        self.say("rates of the device")
        try:
            self._measure_rates()
        except Exception as error:
            self.say(f"no shares, as the rates cannot be measured: {one_line(error)}")
        self._recover()
        yield None
        small: list[tuple[Workload, list[str]]] = []
        for i, workload in enumerate(self.workloads):
            if self.clock() - began > self.budget:
                self.left.append(_label(workload))
                continue
            seconds = self.clock() - began
            self.say(f"[{i + 1}/{len(self.workloads)}] {seconds:4.0f} s  {_label(workload)}")
            right = self._measured(workload, self._measure)
            if workload.is_small and right:
                small.append((workload, right))
            yield workload
        # Last: what fails in a capture may take the device with it.
        for measure, what in ((self._measure_host, "host"), (self._measure_graphs, "graph")):
            for workload, right in small:
                if self.clock() - began > self.budget:
                    self.left.append(f"{_label(workload)} {what}")
                    continue
                self.say(f"{what}: {_label(workload)}")
                self._measured(workload, partial(measure, names=right))
                yield workload if what == "graph" else None

    def _measured(self, workload: Workload, measure: Callable[[Workload], Any]) -> Any:
        """A workload that fails as a whole is a failure of each of its providers."""
        try:
            return measure(workload)
        except Exception as error:
            text = one_line(error)
        finally:
            torch._dynamo.reset()
            self._recover()
        row = (workload.entry.op, workload.dtype_text, workload.shape_text)
        for name in functions(workload.entry, self.providers, self.peers):
            for mode in self._modes(workload):
                if self.points.get(*row, mode, name) is None:
                    self._add(workload, name, "speed", mode, None, text)
        return []

    def _recover(self) -> None:
        try:
            self.accelerator.synchronize()
            self.accelerator.release_memory()
        except Exception as error:
            raise DeviceLost(one_line(error)) from None

    def _measure_rates(self) -> None:
        copied_at = rates.copy_rate(self.accelerator)
        facts = json.dumps(self.facts)
        self.points.add([_rate(COPY, copied_at, "GB/s", "float32", facts)])
        dtypes = {w.dtype for w in self.workloads if w.entry.is_matrix_product}
        for dtype in sorted(dtypes, key=str):
            name = str(dtype).removeprefix("torch.")
            rate = rates.matrix_rate(self.accelerator, dtype)
            self.points.add([_rate(MATRIX_PRODUCT, rate, "TFLOP/s", name, facts)])

    def _calls(self, workload: Workload, names: Sequence[str]) -> dict[str, Call]:
        draw = Draw(self.accelerator.kind, workload.dtype)
        inputs = workload.entry.inputs(draw, workload.shape)
        dys = workload.entry.upstream(draw, inputs)
        return {
            # Peers write into their inputs.
            name: Call(function, copied(inputs) if name in MODULES else inputs, dys)
            for name, function in functions(workload.entry, names, self.peers).items()
        }

    def _measure(self, workload: Workload) -> list[str]:
        """The providers that compute the op, all of whose modes are then timed."""
        calls = self._right(workload, self._calls(workload, self.providers))
        for mode in self._modes(workload):
            prepares = {name: partial(call.prepared, mode) for name, call in calls.items()}
            times, failures = interleaved(self.accelerator, prepares, self.effort, self.clock)
            for name, value in times.items():
                self._add_speed(workload, name, mode, value)
            for name, text in failures.items():
                self._add(workload, name, "speed", mode, None, text)
                self.accelerator.release_memory()
        if "full" in self._modes(workload):
            for name, call in calls.items():
                self._attempt(workload, name, "memory", "full", partial(self._peak, call))
        return list(calls)

    def _right(self, workload: Workload, calls: dict[str, Call]) -> dict[str, Call]:
        """The calls whose results are near float64's."""
        some = next(iter(calls.values()), None)
        if some is None:
            return {}
        entry = workload.entry
        # Of the first provider's inputs, before any has run.
        truths = entry.truth(entry.definition, some.tensors, some.dys)
        gradients = sum(t.nbytes for t in some.tensors if t.requires_grad) / MB
        right = {}
        for name, call in calls.items():
            try:
                error = relative_error(call.results(), truths)
                self._add(workload, name, "error", "full", Spread(error, error, error))
                check(error, workload.dtype)
            except Exception as failure:
                text = str(failure) if isinstance(failure, Wrong) else one_line(failure)
                for mode in self._modes(workload):
                    self._add(workload, name, "speed", mode, None, text)
                self._recover_from(failure)
                continue
            if entry.is_matrix_product:
                self._add(workload, name, "gradients", "full", Spread(*[gradients] * 3))
            right[name] = call
        return right

    def _recover_from(self, failure: Exception) -> None:
        # The frames of the failure hold its tensors.
        failure.__traceback__ = None
        self._recover()

    def _measure_host(self, workload: Workload, names: Sequence[str]) -> None:
        for name, call in self._calls(workload, names).items():
            for mode in HOST_MODES:
                if mode in self._modes(workload):
                    self._attempt(workload, name, "host", mode, partial(self._host, call, mode))

    def _measure_graphs(self, workload: Workload, names: Sequence[str]) -> None:
        if "full" not in self._modes(workload):
            return
        for name, call in self._calls(workload, names).items():
            self._attempt(workload, name, "graph", "full", partial(self._graph, call))
            self._recover()

    def _host(self, call: Call, mode: str) -> Spread:
        call.results()
        return host_microseconds(self.accelerator, call.prepared(mode), self.clock)

    def _graph(self, call: Call) -> Spread:
        call.results()
        replay = self.accelerator.capture(call.full)
        times, failures = interleaved(
            self.accelerator, {"graph": lambda: replay}, self.effort, self.clock
        )
        if failures:
            raise RuntimeError(failures["graph"])
        return times["graph"]

    def _peak(self, call: Call) -> Spread:
        peak = self.accelerator.peak_memory(call.full)
        return Spread(peak, peak, peak)

    def _attempt(
        self,
        workload: Workload,
        name: str,
        metric: str,
        mode: str,
        measure: Callable[[], Spread],
    ) -> None:
        try:
            self._add(workload, name, metric, mode, measure())
        except Exception as error:
            self._add(workload, name, metric, mode, None, one_line(error))

    def _modes(self, workload: Workload) -> list[str]:
        return [mode for mode in workload.modes if mode in self.modes]

    def _add_speed(self, workload: Workload, name: str, mode: str, ms: Spread) -> None:
        self._add(workload, name, "speed", mode, ms)
        work, products = workload.work(mode), workload.entry.is_matrix_product
        unit, scale = ("TFLOP/s", 1e9) if products else ("GB/s", 1e6)
        rate = ms.map(lambda value: work / value / scale)
        self._add(workload, name, "throughput", mode, rate, unit=unit)
        peak = self.points.value(
            *((MATRIX_PRODUCT, workload.dtype_text) if products else (COPY, "float32")),
            "",
            "",
            "torch",
            "throughput",
        )
        if peak:
            self._add(workload, name, "share", mode, rate.map(lambda value: 100 * value / peak))

    def _add(
        self,
        workload: Workload,
        name: str,
        metric: str,
        mode: str,
        value: Spread | None,
        note: str = "",
        unit: str = "",
    ) -> None:
        self.points.add(
            [
                Point(
                    kernel=workload.entry.op,
                    provider=name,
                    metric=metric,
                    unit=unit or UNITS[metric],
                    mode=mode,
                    dims=" x ".join(workload.entry.dims),
                    shape=workload.shape_text,
                    value=value,
                    dtype=workload.dtype_text,
                    note=note,
                )
            ]
        )


def _rate(kernel: str, value: Spread, unit: str, dtype: str, facts: str) -> Point:
    return Point(kernel, "torch", "throughput", unit, "", "", "", value, dtype, facts=facts)


def _label(workload: Workload) -> str:
    return f"{workload.entry.op} {workload.shape_text} {workload.dtype_text}"
