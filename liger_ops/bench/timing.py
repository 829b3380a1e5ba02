"""The accelerator, and timers of calls: on the device by its events, on the host by a clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import Effort, MeasuredDevice, Spread, import_torch_npu, infer_device, spread
from .providers import one_line

KINDS = ("cuda", "npu")

# Larger than the last-level cache of any device.
CACHE_BYTES = 256 * 2**20
# Longer than the host needs to launch any host-bound call: 2 ms at 2 GHz.
HEAD_START_CYCLES = 4_000_000
# A device without a sleep instruction flushes the cache instead, about 0.2 ms each time.
HEAD_START_FLUSHES = 10

# Prepares a call, and returns the function to time.
Prepare = Callable[[], Callable[[], Any]]

WARM_UPS = 3
BURSTS = 11
CALLS_OF_A_BURST = 30

RATE_COPIED_BYTES = 2**31
RATE_MATRIX = 8192


class NoAccelerator(Exception):
    """Nothing can be measured; the text is the reason, in one sentence."""


class Accelerator(MeasuredDevice):
    """A GPU through torch.cuda, or an Ascend NPU through torch.npu, which has the same interface.

    The NPU code has not been run on an Ascend device.
    """

    _cache_filler: Tensor | None = None

    @property
    def is_simulated(self) -> bool:
        """True on a simulated device, which computes results, but whose times mean nothing."""
        return bool(getattr(self.module, "is_simulated", False))

    def flush_cache(self) -> None:
        if self._cache_filler is None:
            self._cache_filler = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.kind)
        self._cache_filler.zero_()

    def head_start(self) -> None:
        """Keep the device busy while the host queues the timed call."""
        if hasattr(self.module, "_sleep"):
            self.module._sleep(HEAD_START_CYCLES)
        else:
            for _ in range(HEAD_START_FLUSHES):
                self.flush_cache()

    def free_memory(self) -> int:
        return int(self.module.mem_get_info()[0])

    def release_memory(self) -> None:
        self.module.empty_cache()

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Capture the call in a graph, and return a function that replays it."""
        # Compile kernels and let libraries allocate before the capture, on a stream of its own.
        stream = self.module.Stream()
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            for _ in range(3):
                function()
        self.module.current_stream().wait_stream(stream)
        graph = getattr(self.module, "CUDAGraph" if self.kind == "cuda" else "NPUGraph")()
        with self.module.graph(graph):
            # Keep the outputs alive as long as the graph, which writes to them.
            outputs = function()
        return lambda: (graph.replay(), outputs)


def find(kind: str | None) -> Accelerator:
    """Return the accelerator of a device type; for None, any accelerator of this machine.

    Raises:
        NoAccelerator: there is no accelerator.
    """
    try:
        kind = kind or infer_device()
        if kind == "npu":
            import_torch_npu()
    except ImportError as error:
        raise NoAccelerator(str(error)) from error
    if kind not in KINDS:
        raise NoAccelerator("PyTorch finds no GPU and no NPU on this machine")
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        more = "; python -m liger_ops --npu says why" if kind == "npu" else ""
        raise NoAccelerator(f"PyTorch finds no {kind} device on this machine{more}")
    return Accelerator(kind)


# Effort for the peak rates of the device.
RATE_EFFORT = Effort(seconds=3.0)


def without_preparation(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Prepare]:
    """Return calls that need no preparation, for `interleaved`."""

    def prepare(call: Callable[[], Any]) -> Callable[[], Any]:
        return call

    return {name: partial(prepare, call) for name, call in calls.items()}


def interleaved(
    accelerator: Accelerator, prepares: Mapping[str, Prepare], effort: Effort
) -> tuple[dict[str, Spread], dict[str, str]]:
    """Time calls on the device: milliseconds per call, and one line for each call that failed. The
    seconds of `effort` are for each provider.

    In every round each call runs once, after a flush of the cache, and the order rotates from round
    to round. A change during the measurement, such as of a clock rate or by another process, thus
    affects all calls.
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
    began, providers = accelerator.clock(), len(running)
    for turn in range(effort.rounds):
        names = list(running)
        if not names or effort.is_spent(turn, (accelerator.clock() - began) / providers):
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


def _sample(accelerator: Accelerator, prepare: Prepare) -> tuple[Any, Any]:
    timed = prepare()
    accelerator.flush_cache()
    accelerator.head_start()
    start = accelerator.recorded()
    timed()
    return start, accelerator.recorded()


def host_microseconds(accelerator: Accelerator, function: Callable[[], Any]) -> Spread:
    """Measure the host's time per call, in bursts that the device can queue."""
    _warm_up(accelerator, lambda: function)
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BURSTS):
            accelerator.synchronize()
            began = accelerator.clock()
            for _ in range(CALLS_OF_A_BURST):
                function()
            times.append((accelerator.clock() - began) / CALLS_OF_A_BURST * 1e6)
    finally:
        if collecting:
            gc.enable()
    accelerator.synchronize()
    return spread(times)


def timed(accelerator: Accelerator, call: Callable[[], Any], effort: Effort) -> Spread:
    """Measure the milliseconds of one call on the device.

    Raises:
        RuntimeError: the call failed.
    """
    times, failures = interleaved(accelerator, {"call": lambda: call}, effort)
    if failures:
        raise RuntimeError(failures["call"])
    return times["call"]


def copy_rate(accelerator: Accelerator) -> Spread:
    """Measure the copy rate in GB/s, counting bytes read and bytes written."""
    count = min(RATE_COPIED_BYTES, accelerator.free_memory() // 4) // 4
    source = torch.randn(count, device=accelerator.kind)
    target = torch.empty_like(source)
    times = timed(accelerator, lambda: target.copy_(source), RATE_EFFORT)
    return times.map(lambda ms: 2 * source.nbytes / ms / 1e6)


def matrix_rate(accelerator: Accelerator, dtype: torch.dtype) -> Spread:
    """Measure the TFLOP/s of a product of square random matrices: with zeros it would be faster."""
    size = (RATE_MATRIX, RATE_MATRIX)
    a, b = (torch.randn(size, device=accelerator.kind, dtype=dtype) for _ in range(2))
    times = timed(accelerator, lambda: a @ b, RATE_EFFORT)
    return times.map(lambda ms: 2 * RATE_MATRIX**3 / ms / 1e9)
