"""The bench's timing, tested with the CPU and a clock of the test in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_stand_in import CpuStandIn, ManualClock
from liger_ops.bench.measure import ProviderCall
from liger_ops.bench.timing import (
    BURSTS,
    CALLS_OF_A_BURST,
    WARM_UPS,
    host_microseconds,
    interleaved,
)
from liger_ops.device import FEWEST_ROUNDS, Effort, HostEvent, MeasuredDevice, Spread, spread


def test_spread_is_the_median_and_percentiles() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Spread(3.0, 2.0, 5.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
    # A rate is highest where the time is shortest.
    assert Spread(2.0, 1.0, 4.0).map(lambda ms: 8 / ms) == Spread(4.0, 2.0, 8.0)


def test_only_the_call_is_timed_after_a_flush_and_a_head_start() -> None:
    clock = ManualClock()
    accelerator = CpuStandIn(clock)

    def prepare() -> Any:
        clock.now += 100.0
        accelerator.log.append("prepared")

        def call() -> None:
            clock.now += 0.002
            accelerator.log.append("called")

        return call

    times, failed = interleaved(accelerator, {"x": prepare}, Effort(rounds=4))
    assert failed == {}
    assert times["x"].p50 == pytest.approx(2.0)
    warm_up = ["prepared", "called"] * WARM_UPS + ["synchronize"]
    one_round = ["prepared", "flush", "head start", "called", "synchronize"]
    assert accelerator.log == warm_up + one_round * 4


def test_steps_in_a_row_are_timed_from_one_end_to_the_next() -> None:
    clock = ManualClock()
    accelerator = CpuStandIn(clock)
    accelerator.module = SimpleNamespace(
        Event=lambda enable_timing: HostEvent(clock),
        reset_peak_memory_stats=lambda: accelerator.log.append("reset"),
        max_memory_allocated=lambda: 3 * 2**20,
    )
    seconds = iter((9.0, 0.001, 0.003, 0.002))

    def step() -> None:
        clock.now += next(seconds)
        accelerator.log.append("step")

    times, peak = accelerator.consecutive(step, steps=3, warm_ups=1)
    assert times.p50 == pytest.approx(2.0) and times.p80 == pytest.approx(3.0)
    assert peak == 3 * 2**20
    log = ["step", "synchronize", "reset", "synchronize", *["step"] * 3, "synchronize"]
    assert accelerator.log == log


def test_what_runs_before_each_step_is_not_timed() -> None:
    clock = ManualClock()

    def passing(seconds: float) -> Callable[[], None]:
        return lambda: setattr(clock, "now", clock.now + seconds)

    device = MeasuredDevice("cpu", clock)
    times = device.times(passing(0.002), Effort(rounds=3), before=passing(9.0))
    assert times == pytest.approx([2.0] * 3)
    # It counts for the seconds of the effort, and a few steps are timed however long they take.
    rounds = len(device.times(passing(0.5), Effort(100, seconds=7.0), before=passing(0.5)))
    assert rounds == 8
    assert len(device.times(passing(1.0), Effort(100, seconds=0.1))) == FEWEST_ROUNDS


def test_a_cpu_s_peak_is_what_a_call_holds_at_once() -> None:
    device = MeasuredDevice("cpu")

    def call() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8)

    assert 2**20 <= device.peak_bytes(call) < 2**21
    (_, peak) = device.consecutive(call, steps=1)
    assert 2**20 <= peak < 2**21 and device.name == "the CPU"


def test_each_mode_times_its_part() -> None:
    parts: list[str] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            parts.append("forward")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            parts.append("backward")
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    call = ProviderCall(Doubled.apply, [x], [torch.full((3,), 5.0)])
    expected = {
        "forward": ([], ["forward"]),
        "backward": (["forward"], ["forward", "backward"]),
        "full": ([], ["forward", "backward"]),
    }
    for mode, (before, within) in expected.items():
        parts.clear()
        run = call.prepared(mode)
        assert parts == before
        (result,) = run()
        assert parts == within
        assert result.tolist() == [2.0 if mode == "forward" else 10.0] * 3
    assert x.grad is None


def test_rounds_interleave_and_turn() -> None:
    clock = ManualClock()
    order: list[str] = []
    prepares = {name: (lambda name=name: lambda: order.append(name)) for name in "abc"}
    interleaved(CpuStandIn(clock), prepares, Effort(rounds=4))
    assert "".join(order[3 * WARM_UPS :]) == "abcbcacababc"


def test_long_calls_are_timed_less_often() -> None:
    clock = ManualClock()
    calls = []

    def call() -> None:
        calls.append(None)
        clock.now += 1.0

    interleaved(CpuStandIn(clock), {"x": lambda: call}, Effort(rounds=100, seconds=7.0))
    assert len(calls) == WARM_UPS + 8
    calls.clear()
    interleaved(CpuStandIn(clock), {"x": lambda: call}, Effort(rounds=100, seconds=0.1))
    assert len(calls) == WARM_UPS + FEWEST_ROUNDS


@pytest.mark.parametrize("good_calls", (0, WARM_UPS + 1))
def test_a_failing_call_is_a_line_and_stops_no_other(good_calls: int) -> None:
    clock = ManualClock()
    done: list[str] = []

    def bad() -> None:
        if done.count("bad") == good_calls:
            raise RuntimeError("no kernel\nfor this")
        done.append("bad")

    times, failed = interleaved(
        CpuStandIn(clock),
        {"bad": lambda: bad, "good": lambda: lambda: done.append("good")},
        Effort(rounds=6),
    )
    assert failed == {"bad": "RuntimeError: no kernel"}
    assert list(times) == ["good"]
    assert done.count("good") == WARM_UPS + 6


def test_host_time_is_that_of_the_calls_alone() -> None:
    clock = ManualClock()
    accelerator = CpuStandIn(clock)
    calls = []

    def call() -> None:
        calls.append(None)
        clock.now += 3e-6

    accelerator.synchronize = lambda: setattr(clock, "now", clock.now + 1.0)  # type: ignore[method-assign]
    assert host_microseconds(accelerator, call).p50 == pytest.approx(3.0)
    assert len(calls) == WARM_UPS + BURSTS * CALLS_OF_A_BURST
