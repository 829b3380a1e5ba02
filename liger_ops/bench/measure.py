"""Run the bench: check every provider's call of a workload against float64, then measure it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import MIB, Clock, Effort, Spread
from .providers import MODULES, PROVIDERS, Peers, functions, one_line
from .show import COPY, MATRIX_PRODUCT, OF_VALUES, SIMULATED, UNITS, Point, Points
from .timing import Accelerator, copy_rate, host_microseconds, interleaved, matrix_rate, timed
from .workloads.entry import MODES, Draw, Function, Workload, as_tuple, dtype_name

# The result of a measurement, or the reason that there is none.
Measurement = Spread | float | str

# Host time is measured for what a user calls, and for a training step.
HOST_MODES = ("forward", "full")
# Bounds of the relative error in norm. bfloat16: one rounding is 1.7e-3, and peers sum a weight's
# gradient in bfloat16, part by part; float32: other orders of summation, and fast exponentials.
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class DeviceLost(Exception):
    """The device no longer works, as after an illegal memory access."""


class Wrong(Exception):
    """A provider does not compute the op."""


@dataclass
class ProviderCall:
    """A provider's function, its arguments, and the gradients of its outputs."""

    function: Function
    tensors: Sequence[Tensor]
    dys: Sequence[Tensor]

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forward of a training step: autograd records it."""
        return as_tuple(self.function(*self.tensors))

    def backward(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor for tensor in self.tensors if tensor.requires_grad]
        return torch.autograd.grad(outputs, leaves, self.dys)

    def full(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())

    def results(self) -> list[Tensor]:
        """Return the outputs and gradients; also cast `dys` to the dtypes of the outputs."""
        outputs = self.forward()
        self.dys = [dy.to(y.dtype) for dy, y in zip(self.dys, outputs, strict=True)]
        return [*(y.detach() for y in outputs), *self.backward(outputs)]

    def prepared(self, mode: str) -> Callable[[], Any]:
        """Return the call to time. For a backward, run the forward first, which is not timed."""
        if mode != "backward":
            return {"forward": self.forward, "full": self.full}[mode]
        outputs = self.forward()
        return lambda: self.backward(outputs)


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clone tensors; a clone requires a gradient if its tensor does."""
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def relative_error(values: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """Return the largest |value - truth| / |truth| in norm over outputs and gradients, and NaN if
    one is NaN."""
    if len(values) != len(truths):
        raise Wrong(f"wrong: it gives {len(values)} outputs and gradients, not {len(truths)}")
    errors = []
    for value, truth in zip(values, truths, strict=True):
        if value.shape != truth.shape:
            raise Wrong(f"wrong: it gives shape {tuple(value.shape)}, not {tuple(truth.shape)}")
        scale = float(truth.norm())
        distance = float((value.double() - truth).norm())
        errors.append(distance / scale if scale else distance)
    return max(errors, key=lambda error: float("inf") if error != error else error)


def check(error: float, dtype: torch.dtype) -> None:
    """Raise Wrong if a relative error is above the bound or NaN."""
    bound = BOUNDS[dtype]
    if not error <= bound:
        raise Wrong(f"wrong: relative error {error:.1e}, allowed {bound:.0e}")


@dataclass
class Run:
    """A run over workloads. `points` has everything measured so far."""

    accelerator: Accelerator
    workloads: Sequence[Workload]
    providers: Sequence[str] = PROVIDERS
    modes: Sequence[str] = MODES
    effort: Effort = Effort()
    # No workload is started after this many seconds.
    budget: float = float("inf")
    facts: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    clock: Clock = time.perf_counter
    peers: Peers = field(default_factory=Peers)
    points: Points = field(default_factory=Points)
    # Workloads that were not started, because the budget was used up.
    left: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[Workload | None]:
        """Measure, and yield whenever there is more to save: the workload if it is complete, and
        None otherwise.

        Small workloads are yielded twice, the second time with the host's times.

        Raises:
            DeviceLost: the device did not recover from a failure.
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
            seconds = self.clock() - began
            if seconds > self.budget:
                self.left.append(str(workload))
                continue
            self.say(f"[{i + 1}/{len(self.workloads)}] {seconds:4.0f} s  {workload}")
            correct = self._measured(workload, self._measure)
            if workload.is_small and correct:
                small.append((workload, correct))
            yield workload
        # Captures are last, because a failed capture may make the device unusable.
        for measure, metric in ((self._measure_host, "host"), (self._measure_graphs, "graph")):
            for workload, correct in small:
                if self.clock() - began > self.budget:
                    self.left.append(f"{workload} {metric}")
                    continue
                self.say(f"{metric}: {workload}")
                self._measured(workload, partial(measure, names=correct))
                yield workload if metric == "graph" else None

    def _measured(self, workload: Workload, measure: Callable[[Workload], Any]) -> Any:
        """Call `measure`; if the workload fails as a whole, record a failure for each provider."""
        try:
            return measure(workload)
        except Exception as error:
            text = one_line(error)
        finally:
            torch.compiler.reset()
            self._recover()
        for name in functions(workload.entry, self.providers, self.peers):
            for mode in self._modes(workload):
                if self.points.get(*workload.row, mode, name) is None:
                    self._add(workload, name, "speed", mode, text)
        return []

    def _recover(self) -> None:
        try:
            self.accelerator.synchronize()
            self.accelerator.release_memory()
        except Exception as error:
            raise DeviceLost(one_line(error)) from None

    def _measure_rates(self) -> None:
        self._add_rate(COPY, "GB/s", torch.float32, copy_rate(self.accelerator))
        dtypes = {w.dtype for w in self.workloads if w.entry.is_matrix_product}
        for dtype in sorted(dtypes, key=str):
            self._add_rate(MATRIX_PRODUCT, "TFLOP/s", dtype, matrix_rate(self.accelerator, dtype))

    def _calls(self, workload: Workload, names: Sequence[str]) -> dict[str, ProviderCall]:
        draw = Draw(self.accelerator.kind, workload.dtype)
        inputs = workload.entry.inputs(draw, workload.shape)
        dys = workload.entry.upstream(draw, inputs)
        return {
            # Peers get copies, because they write to their inputs.
            name: ProviderCall(function, copied(inputs) if name in MODULES else inputs, dys)
            for name, function in functions(workload.entry, names, self.peers).items()
        }

    def _measure(self, workload: Workload) -> list[str]:
        """Time all modes of the providers that compute the op, and return these providers."""
        calls = self._correct(workload, self._calls(workload, self.providers))
        for mode in self._modes(workload):
            prepares = {name: partial(call.prepared, mode) for name, call in calls.items()}
            times, failures = interleaved(self.accelerator, prepares, self.effort)
            for name, value in times.items():
                self._add_speed(workload, name, mode, value)
            for name, text in failures.items():
                self._add(workload, name, "speed", mode, text)
                self.accelerator.release_memory()
        if "full" in self._modes(workload):
            for name, call in calls.items():
                peak = partial(self._peak, call)
                self._attempt(workload, name, "memory", "full", peak)
        return list(calls)

    def _correct(
        self, workload: Workload, calls: dict[str, ProviderCall]
    ) -> dict[str, ProviderCall]:
        """Return the calls whose results are close to float64, and record failures of others."""
        first = next(iter(calls.values()), None)
        if first is None:
            return {}
        entry = workload.entry
        # The truth is computed from the first provider's inputs, before any call has run.
        truths = entry.truth(entry.definition, first.tensors, first.dys)
        gradients = sum(t.nbytes for t in first.tensors if t.requires_grad) / MIB
        correct = {}
        for name, call in calls.items():
            try:
                error = relative_error(call.results(), truths)
                self._add(workload, name, "error", "full", error)
                check(error, workload.dtype)
            except Exception as failure:
                text = str(failure) if isinstance(failure, Wrong) else one_line(failure)
                for mode in self._modes(workload):
                    self._add(workload, name, "speed", mode, text)
                # The traceback's frames keep the call's tensors alive.
                failure.__traceback__ = None
                self._recover()
                continue
            if entry.is_matrix_product:
                self._add(workload, name, "gradients", "full", gradients)
            correct[name] = call
        return correct

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

    def _peak(self, call: ProviderCall) -> float:
        return self.accelerator.peak_bytes(call.full) / MIB

    def _host(self, call: ProviderCall, mode: str) -> Spread:
        call.results()
        return host_microseconds(self.accelerator, call.prepared(mode))

    def _graph(self, call: ProviderCall) -> Spread:
        call.results()
        replay = self.accelerator.capture(call.full)
        return timed(self.accelerator, replay, self.effort)

    def _modes(self, workload: Workload) -> list[str]:
        return [mode for mode in workload.modes if mode in self.modes]

    def _attempt(
        self,
        workload: Workload,
        name: str,
        metric: str,
        mode: str,
        measure: Callable[[], Measurement],
    ) -> None:
        try:
            measurement = measure()
        except Exception as error:
            measurement = one_line(error)
        self._add(workload, name, metric, mode, measurement)

    def _add_speed(self, workload: Workload, name: str, mode: str, ms: Spread) -> None:
        self._add(workload, name, "speed", mode, ms)
        work, products = workload.work(mode), workload.entry.is_matrix_product
        unit, scale = ("TFLOP/s", 1e9) if products else ("GB/s", 1e6)
        rate = ms.map(lambda value: work / value / scale)
        self._add(workload, name, "throughput", mode, rate, unit)
        of_device = (MATRIX_PRODUCT, workload.row[1]) if products else (COPY, "float32")
        peak = self.points.value(*of_device, "", "", "torch", "throughput")
        if peak:
            self._add(workload, name, "share", mode, rate.map(lambda value: 100 * value / peak))

    def _add(
        self,
        workload: Workload,
        name: str,
        metric: str,
        mode: str,
        measurement: Measurement,
        unit: str = "",
    ) -> None:
        op, dtype, shape = workload.row
        dims = " x ".join(workload.entry.dims)
        if (
            self.accelerator.is_simulated
            and metric not in OF_VALUES
            and not isinstance(measurement, str)
        ):
            measurement = SIMULATED
        value, note = (None, measurement) if isinstance(measurement, str) else (measurement, "")
        if isinstance(value, float):
            value = Spread(value, value, value)
        unit = unit or UNITS[metric]
        self.points.add([Point(op, name, metric, unit, mode, dims, shape, value, dtype, note)])

    def _add_rate(self, kernel: str, unit: str, dtype: torch.dtype, rate: Spread) -> None:
        where = (kernel, "torch", "throughput", unit, "", "", "")
        simulated = self.accelerator.is_simulated
        value, note = (None, SIMULATED) if simulated else (rate, "")
        facts = json.dumps(self.facts)
        self.points.add([Point(*where, value, dtype_name(dtype), note, facts)])
