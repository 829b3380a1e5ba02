"""The bench's logic, with the CPU and a clock of the test in the place of a GPU. No figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_points import point, rates, timed
from bench_stand_in import CpuStandIn, ManualClock
from liger_ops.bench import checking, comparing, docs, plotting, records, table, targets
from liger_ops.bench import rates as device_rates
from liger_ops.bench.calls import Call
from liger_ops.bench.command_line import carried_out, main
from liger_ops.bench.device import Accelerator
from liger_ops.bench.measuring import Run
from liger_ops.bench.points import COPY, Points
from liger_ops.bench.providers import PROVIDERS
from liger_ops.bench.timing import (
    BURSTS,
    CALLS_OF_A_BURST,
    FEWEST_ROUNDS,
    WARM_UPS,
    Effort,
    Spread,
    host_microseconds,
    interleaved,
    spread,
)
from liger_ops.bench.verdicts import failures, losses, verdicts
from liger_ops.bench.workloads import ENTRIES
from liger_ops.bench.workloads.entry import Workload

ROOT = Path(__file__).parents[1]
SHARED = {"gpu": "a GPU", "timestamp": "2026-01-02 03:04:05", "version": "0.1.0"}
FIELDS = [
    "kernel_name",
    "kernel_provider",
    "metric_name",
    "metric_unit",
    "gpu_name",
    "x_name",
    "x_label",
    "x_values",
    "y_values_50",
    "y_values_20",
    "y_values_80",
    "kernel_operation_mode",
    "extra_benchmark_config_str",
    "timestamp",
    "version",
]


# The device


class DeviceModule:
    """The part of torch.npu that the bench uses, as it is called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated = [100 * 2**20]

    def Stream(self) -> DeviceModule:
        return self

    current_stream = Stream

    def wait_stream(self, stream: DeviceModule) -> None:
        self.log.append("wait")

    def NPUGraph(self) -> DeviceModule:
        return self

    def replay(self) -> None:
        self.log.append("replay")

    @contextmanager
    def graph(self, graph: DeviceModule) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")

    @contextmanager
    def stream(self, stream: DeviceModule) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def memory_allocated(self) -> int:
        return self.allocated[-1]

    def max_memory_allocated(self) -> int:
        return max(self.allocated)


@pytest.fixture
def npu() -> Accelerator:
    accelerator = Accelerator("cpu")
    accelerator.kind, accelerator.module = "npu", DeviceModule()
    return accelerator


def test_a_graph_is_captured_after_a_warm_up(npu: Accelerator) -> None:
    log = npu.module.log
    replay = npu.capture(lambda: log.append("call"))
    assert log == ["wait", "call", "call", "call", "wait", "capture", "call", "captured"]
    replay()
    assert log[-1] == "replay"


def test_peak_memory_is_beyond_what_was_there(npu: Accelerator) -> None:
    log, allocated = npu.module.log, npu.module.allocated

    def call() -> None:
        log.append("call")
        allocated.extend((130 * 2**20, 110 * 2**20))

    assert npu.peak_memory(call) == 30.0
    assert log == ["synchronize", "reset", "call", "synchronize"]


def test_the_head_start_is_a_sleep_or_writes(
    npu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes: list[None] = []
    monkeypatch.setattr(Accelerator, "flush_cache", lambda self: flushes.append(None))
    npu.head_start()
    assert len(flushes) == 10
    cycles: list[int] = []
    npu.module._sleep = cycles.append
    npu.head_start()
    assert len(flushes) == 10 and cycles == [4_000_000]


# Timing


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

    times, failed = interleaved(accelerator, {"x": prepare}, Effort(rounds=4), clock)
    assert failed == {}
    assert times["x"].p50 == pytest.approx(2.0)
    warm_up = ["prepared", "called"] * WARM_UPS + ["synchronize"]
    one_round = ["prepared", "flush", "head start", "called", "synchronize"]
    assert accelerator.log == warm_up + one_round * 4


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
    call = Call(Doubled.apply, [x], [torch.full((3,), 5.0)])
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
    interleaved(CpuStandIn(clock), prepares, Effort(rounds=4), clock)
    assert "".join(order[3 * WARM_UPS :]) == "abcbcacababc"


def test_long_calls_are_timed_less_often() -> None:
    clock = ManualClock()
    calls = []

    def call() -> None:
        calls.append(None)
        clock.now += 1.0

    interleaved(CpuStandIn(clock), {"x": lambda: call}, Effort(rounds=100, seconds=7.0), clock)
    assert len(calls) == WARM_UPS + 8
    calls.clear()
    interleaved(CpuStandIn(clock), {"x": lambda: call}, Effort(rounds=100, seconds=0.1), clock)
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
        clock,
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
    assert host_microseconds(accelerator, call, clock).p50 == pytest.approx(3.0)
    assert len(calls) == WARM_UPS + BURSTS * CALLS_OF_A_BURST


# Checking


def test_the_error_is_the_largest_and_nan_never_passes() -> None:
    truth = [torch.tensor([3.0, 4.0]).double(), torch.zeros(2).double()]
    found = [torch.tensor([3.0, 4.5]), torch.zeros(2)]
    assert checking.relative_error(found, truth) == pytest.approx(0.1)
    found[1][0] = torch.nan
    error = checking.relative_error(found, truth)
    assert math.isnan(error)
    for wrong in (error, 0.5):
        with pytest.raises(checking.Wrong, match="wrong: relative error"):
            checking.check(wrong, torch.float32)
    checking.check(1e-6, torch.float32)


def test_another_shape_or_number_of_results_is_wrong() -> None:
    truth = [torch.zeros(2, 3).double()]
    with pytest.raises(checking.Wrong, match=r"shape \(3, 2\), not \(2, 3\)"):
        checking.relative_error([torch.zeros(3, 2)], truth)
    with pytest.raises(checking.Wrong, match="gives 2 outputs and gradients, not 1"):
        checking.relative_error([torch.zeros(2, 3)] * 2, truth)


# A run


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "MATRIX", 16)


def run_of(*workloads: Workload, **options: Any) -> tuple[Run, list[str]]:
    said: list[str] = []
    options = {"providers": ("liger_ops", "eager", "aten"), "effort": Effort(rounds=2)} | options
    accelerator = options.pop("accelerator", None) or CpuStandIn()
    return Run(accelerator, workloads, say=said.append, facts={"torch": "2"}, **options), said


def norm(shape: tuple[int, int] = (6, 32), **changes: Any) -> Workload:
    return Workload(replace(ENTRIES["rms_norm"], **changes), shape, torch.float32)


def found(run: Run, metric: str) -> set[tuple[str, str]]:
    return {(p.provider, p.mode) for p in run.points if p.metric == metric and p.value is not None}


def test_a_run_measures_everything() -> None:
    head = Workload(ENTRIES["linear_cross_entropy"], (7, 16, 50), torch.float32)
    run, _ = run_of(norm(small=(6, 32)), head)
    done = list(run.steps())
    assert [w.entry.op if w else None for w in done] == [
        None,
        "rms_norm",
        "linear_cross_entropy",
        None,
        "rms_norm",
    ]
    three = ("liger_ops", "eager", "aten")
    everything = {(name, mode) for name in three for mode in ("forward", "backward", "full")}
    matrix = {("liger_ops", "full"), ("eager", "full")}
    assert found(run, "speed") == found(run, "share") == everything
    assert found(run, "memory") == found(run, "error") == {(name, "full") for name in three}
    assert found(run, "host") == {(name, mode) for name in three for mode in ("forward", "full")}
    assert found(run, "graph") == {(name, "full") for name in three}
    assert found(run, "gradients") == matrix
    assert run.points.rate(COPY) and run.points.rate("matrix_product")
    assert failures(run.points) == []
    # The share is that of the rate, and the rate that of the work.
    row = ("rms_norm", "float32", "6x32", "backward", "eager")
    ms, gb, share = (run.points.value(*row, m) for m in ("speed", "throughput", "share"))
    assert ms is not None and gb == pytest.approx(3 * 6 * 32 * 4 / ms / 1e6)
    assert share == pytest.approx(100 * gb / run.points.rate(COPY))
    row = ("linear_cross_entropy", "float32", "7x16x50", "full", "liger_ops")
    ms, share = (run.points.value(*row, metric) for metric in ("speed", "share"))
    product = run.points.rate("matrix_product")
    assert share == pytest.approx(100 * 6 * 7 * 16 * 50 / ms / 1e9 / product)
    assert run.points.value(*row, "gradients") == pytest.approx((7 + 50) * 16 * 4 / 2**20)


@pytest.mark.parametrize(
    ("ours", "note"),
    [
        (lambda x, w: 1.01 * ENTRIES["rms_norm"].ours(x, w), "wrong: relative error 1.0e-02"),
        (lambda x, w: ENTRIES["rms_norm"].ours(x, w) * math.nan, "wrong: relative error nan"),
        (lambda x, w: torch.ops.aten.no_such_op(x), "AttributeError: "),
        # Its gradient alone is wrong.
        (lambda x, w: ENTRIES["rms_norm"].ours(x, w.detach() + 0 * w), "wrong: relative error"),
    ],
    ids=("value", "nan", "raises", "gradient"),
)
def test_what_is_wrong_is_not_timed(ours: Any, note: str) -> None:
    run, _ = run_of(norm(ours=ours, small=(6, 32)))
    list(run.steps())
    for metric in ("speed", "share", "memory", "host", "graph"):
        assert {name for name, _ in found(run, metric)} == {"eager", "aten"}
    assert len(failures(run.points)) == 3
    assert all(note in text for text in failures(run.points))


def test_a_workload_without_a_truth_fails_for_all_and_the_next_runs() -> None:
    def truth(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run, _ = run_of(norm(truth=truth), norm((4, 16)))
    list(run.steps())
    notes = {p.note for p in run.points if p.shape == "6x32"}
    assert notes == {"OutOfMemoryError: CUDA out of memory"}
    assert len([p for p in run.points if p.shape == "6x32"]) == 9
    assert run.points.value("rms_norm", "float32", "4x16", "full", "liger_ops") is not None


def test_a_peer_writes_into_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(module: Any) -> Any:
        def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = ENTRIES["rms_norm"].aten(x, weight)
            x.data.zero_()
            return y

        return function

    monkeypatch.setattr("liger_ops.bench.providers.MODULES", {"liger-kernel": "math"})
    workload = norm(peers={"liger-kernel": adapter})
    run, _ = run_of(workload, providers=("liger-kernel", "liger_ops"))
    list(run.steps())
    assert {name for name, _ in found(run, "speed")} >= {"liger_ops"}
    assert failures(run.points) == []


def test_a_lost_device_ends_the_run_and_keeps_the_file(tmp_path: Path) -> None:
    accelerator = CpuStandIn()

    def lose(*arguments: Any) -> Any:
        accelerator.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    run, said = run_of(norm((4, 16)), norm(ours=lose), norm((8, 16)), accelerator=accelerator)
    carried_out(run, accelerator, tmp_path / "run.json")
    assert said[-1].startswith("the device is lost, and the rest not measured: RuntimeError")
    points, _ = records.read(tmp_path / "run.json")
    assert {p.shape for p in points if p.value is not None and p.shape} == {"4x16"}
    assert "8x16" not in {p.shape for p in points}


def test_the_file_grows_with_every_workload(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    seen = []

    def look(*arguments: Any) -> Any:
        seen.append({p.shape for p in records.read(file)[0]})
        return ENTRIES["rms_norm"].ours(*arguments)

    run, _ = run_of(norm((4, 16)), norm(ours=look))
    carried_out(run, run.accelerator, file)
    assert seen[0] == {"", "4x16"}
    assert {p.shape for p in records.read(file)[0]} == {"", "4x16", "6x32"}


def test_the_budget_is_not_begun_after(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()

    def slow(*arguments: Any) -> Any:
        clock.now += 5.0
        return ENTRIES["rms_norm"].ours(*arguments)

    first = norm((4, 16), ours=slow, small=(4, 16))
    run, said = run_of(first, norm(), budget=4.0, clock=clock)
    carried_out(run, run.accelerator, None)
    assert run.left == ["rms_norm 6x32 float32", "rms_norm 4x16 float32 host"] + [
        "rms_norm 4x16 float32 graph"
    ]
    assert said[-1].startswith("the time was over before 3: rms_norm 6x32 float32")
    assert {p.shape for p in run.points} == {"", "4x16"}
    assert {p.metric for p in run.points} & {"host", "graph"} == set()
    assert "rms_norm 4x16 float32" in capsys.readouterr().out


def test_a_failed_capture_is_a_note() -> None:
    class NoGraphs(CpuStandIn):
        def capture(self, function: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    run, _ = run_of(norm(small=(6, 32)), accelerator=NoGraphs())
    list(run.steps())
    assert found(run, "graph") == set()
    assert found(run, "host")
    assert len(failures(run.points)) == 1


# Records


def test_records_have_the_fields_of_the_field() -> None:
    points = [
        point("liger_ops", 0.5, shape="32768x4096"),
        point("liger_ops", 0.25, shape="32768x1024"),
        point("quack", None, note="ImportError: no"),
        point("liger_ops", math.nan, metric="error"),
    ]
    found = records.as_records(points, *SHARED.values())
    assert all(list(record) == FIELDS for record in found)
    speed, failed, error = found
    assert speed["x_values"] == ["32768x4096", "32768x1024"]
    assert speed["y_values_50"] == [0.5, 0.25]
    assert speed["y_values_20"] == pytest.approx([0.45, 0.225])
    assert speed["y_values_80"] == pytest.approx([0.6, 0.3])
    assert (speed["kernel_name"], speed["metric_name"], speed["metric_unit"]) == (
        "rms_norm",
        "speed",
        "ms",
    )
    assert (speed["gpu_name"], speed["timestamp"], speed["version"]) == tuple(SHARED.values())
    assert json.loads(speed["extra_benchmark_config_str"]) == {"dtype": "bfloat16"}
    assert failed["y_values_50"] == [None]
    assert json.loads(failed["extra_benchmark_config_str"])["note"] == "ImportError: no"
    assert error["y_values_50"] == [None]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    points = [*rates(), *timed("liger_ops", 0.5, 90.0), point("quack", None, note="no")]
    file = tmp_path / "run.json"
    records.write(file, points, *SHARED.values())
    assert list(tmp_path.iterdir()) == [file]
    read, shared = records.read(file)
    assert list(read) == points
    assert shared == SHARED
    assert read.facts() == {"command": "the command", "torch": "2.11.0"}


# What is shown


def full_house() -> Points:
    """A workload of all six providers, of the longest numbers."""
    points = Points(rates())
    for name in PROVIDERS:
        for mode in ("forward", "backward", "full"):
            points.add(timed(name, 161.313, 101.0, mode=mode, shape="32768x4096"))
        points.add([point(name, 12024.0, metric="memory", mode="full")])
        points.add([point(name, 12024.0, metric="host", mode="forward")])
    return points


def test_the_table_fits_a_terminal() -> None:
    text = table.blocks(full_house())
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:] if line}
    assert rows["liger_ops"] == list(PROVIDERS[1:])
    assert rows["forward"] == ["161.3", "101%"] * 6
    assert rows["peak"] == ["MB"] + ["12024"] * 6
    assert rows["host"] == ["fwd"] + ["12024"] * 6


def test_the_table_says_what_failed_and_what_is_met() -> None:
    points = Points([*rates(), *timed("liger_ops", 0.13, 94.6), point("aten", None, note="why")])
    points.add(timed("liger_ops", 0.3, 70.0, mode="backward"))
    text = table.blocks(points)
    assert "  met: forward 95%: 95%" in text
    assert "  MISSED: backward 87%: 70%" in text
    assert "failed" in text and "  aten: why" in text
    assert table.summary(points).splitlines()[:3] == [
        "copies at 4000 GB/s, multiplies matrices at 700 TFLOP/s",
        "targets: 1 of 2 met",
        "  missed: rms_norm 32768x4096 backward 87%: 70%",
    ]


def test_targets_are_judged_for_bfloat16_and_what_ran() -> None:
    points = Points(timed("liger_ops", 0.13, 94.4))
    points.add(timed("liger_ops", 0.13, 10.0, dtype="float32"))
    points.add(timed("eager", 0.13, 10.0, mode="backward"))
    points.add([point("liger_ops", None, mode="backward", note="no memory")])
    judged = {(v.mode, v.met, v.text) for v in verdicts(points)}
    assert judged == {("forward", False, "95%: 94%"), ("backward", False, "87%: no memory")}


def test_memory_is_judged_beyond_the_gradients() -> None:
    where = {"kernel": "linear_cross_entropy", "shape": "8192x2048x128256", "mode": "full"}
    for peak, met in ((1233.0, True), (1235.0, False)):
        points = Points(timed("liger_ops", 20.0, 88.0, **where))
        points.add([point("liger_ops", peak, metric="memory", **where)])
        points.add([point("liger_ops", 534.0, metric="gradients", **where)])
        assert [(v.mode, v.met) for v in verdicts(points)] == [("full", True), ("memory", met)]


def test_the_host_is_judged_against_the_peers() -> None:
    kernel, shape, mode = targets.HOST_OF
    where = {"kernel": kernel, "shape": shape, "mode": mode}
    points = Points(
        point(name, us, metric="host", **where)
        for name, us in (("liger_ops", 150.0), ("quack", 301.0), ("liger-kernel", 299.0))
    )
    judged = {v.text.split("'")[0].split()[-1]: v.met for v in verdicts(points)}
    assert judged == {"quack": True, "liger-kernel": False}


def test_a_row_is_lost_by_more_than_three_percent() -> None:
    points = Points([point("liger_ops", 1.02), point("aten", 1.0), point("eager", 5.0)])
    assert losses(points) == []
    points.add([point("inductor", 0.9)])
    (loss,) = losses(points)
    assert (loss.winner, loss.text) == (
        "inductor",
        "inductor 0.900 ms, liger_ops 1.020: 13% more",
    )


def test_compared_names_what_changed() -> None:
    rows = {"a": (1.0, 1.02), "b": (1.0, 1.5), "c": (1.0, 0.5)}
    then = Points([*rates(), *(point("liger_ops", old, kernel=k) for k, (old, _) in rows.items())])
    now = Points(
        [*rates(4100.0), *(point("liger_ops", new, kernel=k) for k, (_, new) in rows.items())]
    )
    now.add([point("liger_ops", 1.0, kernel="d"), point("eager", 9.0, kernel="a")])
    assert comparing.compared(now, then).splitlines() == [
        "against the earlier run:",
        "  copies at 4100 GB/s, then at 4000",
        "  slower: b 32768x4096 bfloat16 forward 1.000 -> 1.500 ms (+50%)",
        "  faster: c 32768x4096 bfloat16 forward 1.000 -> 0.500 ms (-50%)",
        "  1 rows within 3%",
    ]


def test_the_page_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    points = full_house()
    points.add([point("inductor", 1.0)])
    docs.write(page, points, SHARED, tmp_path / "docs" / "plots")
    text = page.read_text()
    assert "the command" in text and "a GPU, 2026-01-02 03:04:05, liger_ops 0.1.0, torch 2" in text
    assert "](plots/rms_norm_bfloat16.png)" in text
    header = (
        "| M x N | mode | liger_ops | eager | aten | inductor | liger-kernel | quack | target |"
    )
    assert header in text
    assert "| 32768x4096 | forward ms | 161.3 101% |" in text
    assert "| 95%: 101%, met |" in text
    assert "| rms_norm | 32768x4096 | bfloat16 | forward | inductor 1.000 ms" in text
    page.write_text(f"Before.\n{text}After.\n")
    fewer = Points([*rates(), *timed("liger_ops", 0.5, 90.0)])
    docs.write(page, fewer, SHARED, None)
    text = page.read_text()
    assert text.startswith("Before.\n# Benchmarks\n") and text.endswith("After.\n")
    assert text.count("# Benchmarks\n") == text.count("After.") == 1
    assert "161.3" not in text and ".png" not in text
    assert "None: no provider is faster" in text
    assert "95%: 90%, **missed**" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("prose\n")
    with pytest.raises(ValueError, match="has no lines <!-- figures: begin -->"):
        docs.write(page, full_house(), SHARED, None)
    assert page.read_text() == "prose\n"


def test_plots_are_a_file_for_each_op_and_dtype(tmp_path: Path) -> None:
    points = full_house()
    points.add(timed("liger_ops", 1.0, 50.0, dtype="float32", shape="8x8"))
    points.add([point("liger_ops", 1.0, kernel="softmax")])
    files = plotting.plot(points, tmp_path / "plots")
    assert sorted(file.name for file in files) == ["rms_norm_bfloat16.png", "rms_norm_float32.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert plotting.file_name("rms_norm", "float32") == "rms_norm_float32.png"


# The command line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    records.write(file, full_house(), *SHARED.values())
    return file


def test_an_earlier_run_is_shown_without_a_device(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: str(tmp_path / name) for name in ("plots", "page.md")}
    arguments = ["--from", str(file), "--compare", str(file)]
    assert main([*arguments, "--plot", out["plots"], "--docs", out["page.md"]]) == 0
    printed = capsys.readouterr().out
    assert table.blocks(full_house()) in printed
    assert "3 rows within 3%" in printed
    assert (tmp_path / "plots" / "rms_norm_bfloat16.png").is_file()
    assert "](plots/rms_norm_bfloat16.png)" in (tmp_path / "page.md").read_text()


def test_a_failure_of_ours_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    records.write(file, [point("liger_ops", None, note="wrong")], *SHARED.values())
    assert main(["--from", str(file)]) == 1
    assert "failed: rms_norm 32768x4096 bfloat16 forward: wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ops", "rmsnorm"], "there is no op 'rmsnorm'"),
        (["--shapes", "huge"], "shape 'huge' is none of"),
        (["--providers", "liger_ops,me"], "'me' is none of liger_ops, eager"),
        (["--modes", "sideways"], "'sideways' is none of forward, backward, full"),
        (["--dtypes", "int8"], "dtype 'int8' is none of"),
        (["--repetitions", "0"], "'0' is not an integer of at least 1"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--from", "{folder}/missing.json"], "No such file"),
        (["--from", "{folder}/prose.md"], "prose.md holds no records of a benchmark"),
        (["--from", "{folder}/empty.json"], "empty.json holds no records of a benchmark"),
        (["--from", "{folder}/run.json", "--docs", "{folder}/prose.md"], "has no lines"),
        (["--from", "{folder}/run.json", "--plot", "{folder}/prose.md"], "File exists"),
        (["--compare", "{folder}/missing.json"], "No such file"),
    ],
    ids=lambda value: "-".join(value).replace("{folder}/", "") if isinstance(value, list) else "",
)
def test_a_bad_argument_gets_one_sentence(
    arguments: list[str],
    sentence: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prose.md").write_text("prose\n")
    (tmp_path / "empty.json").write_text("[]\n")
    with pytest.raises(SystemExit) as exited:
        main([argument.format(folder=tmp_path) for argument in arguments])
    printed = capsys.readouterr()
    assert exited.value.code == 2
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", ([], ["--device", "npu"], ["--device", "cuda"]), ids=" ".join)
def test_a_machine_without_a_device_gets_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "liger_ops.bench", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("python -m liger_ops.bench: PyTorch finds no ")
    assert done.stderr.count("\n") == 1
