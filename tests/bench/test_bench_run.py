"""A run of the bench on the CPU checks, measures and records each case. Figures are not tested."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_stand_in import CpuStandIn, ManualClock
from liger_ops.bench import measure, records, timing
from liger_ops.bench.command_line import carried_out
from liger_ops.bench.measure import Run
from liger_ops.bench.show import COPY, failures
from liger_ops.bench.workloads import ENTRIES
from liger_ops.bench.workloads.entry import Workload
from liger_ops.device import Effort


def test_the_error_is_the_largest_and_nan_never_passes() -> None:
    truth = [torch.tensor([3.0, 4.0]).double(), torch.zeros(2).double()]
    found = [torch.tensor([3.0, 4.5]), torch.zeros(2)]
    assert measure.relative_error(found, truth) == pytest.approx(0.1)
    found[1][0] = torch.nan
    error = measure.relative_error(found, truth)
    assert math.isnan(error)
    for wrong in (error, 0.5):
        with pytest.raises(measure.Wrong, match="wrong: relative error"):
            measure.check(wrong, torch.float32)
    measure.check(1e-6, torch.float32)


def test_another_shape_or_number_of_results_is_wrong() -> None:
    truth = [torch.zeros(2, 3).double()]
    with pytest.raises(measure.Wrong, match=r"shape \(3, 2\), not \(2, 3\)"):
        measure.relative_error([torch.zeros(3, 2)], truth)
    with pytest.raises(measure.Wrong, match="gives 2 outputs and gradients, not 1"):
        measure.relative_error([torch.zeros(2, 3)] * 2, truth)


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RATE_MATRIX", 16)


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
        None, "rms_norm", "linear_cross_entropy", None, "rms_norm",
    ]  # fmt: skip
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
