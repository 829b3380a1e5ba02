"""The report measures what has no record, and writes its page from the records alone."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers")
from bench_points import rates, timed
from liger_ops.bench import records as files
from liger_ops.bench.command_line import main
from liger_ops.bench.report import command_line, measured, page, turns
from liger_ops.bench.report.plan import (
    CURVE_WAYS,
    CURVES,
    FAMILIES,
    ON_A_CPU,
    PARTS,
    Measurement,
    Record,
    load,
    plan,
    read_all,
    store,
)
from liger_ops.bench.steps.models import BATCHES
from sources import ROOT

GPU = "NVIDIA H200"
LOSSES = [5.5, 5.4, 5.3, 5.2]
STEP = {
    "losses": LOSSES, "warm_up_s": 41.0, "ms": 231.04, "ms_20": 230.0, "ms_80": 235.0, "gib": 27.2,
    "device": GPU,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


def test_a_quick_run_executes_every_part_and_reports_no_time_of_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("--quick", "--records", tmp_path, "--page", tmp_path / "page.md") == 0
    records = load(tmp_path)
    said = capsys.readouterr().err
    assert {found.name.split("_")[1] for found in records.values()} == set(PARTS)
    for found in records.values():
        assert not found.error and found.seconds == 0
        of_ops = {"points", "missing", "lost"}
        assert found.result.keys() <= {"losses", "note", "ops", "size", *of_ops}
    values = [
        value
        for name in ("quick_heads_linear_cross_entropy_16x16x32", "quick_kernels_rms_norm_8x32")
        for point in files.points_of(records[name].result["points"])
        if (value := point.value) is not None and point.metric not in ("error", "gradients")
    ]
    assert not values
    text = (tmp_path / "page.md").read_text()
    for heading in ("Training steps", "Loss curves", "Heads", "Kernels"):
        assert f"\n## {heading}\n" in text
    assert "## What failed" not in text and "## Not measured" not in text
    assert text.count(ON_A_CPU) > 5 and not re.search(r"\d (ms|GiB)", text)
    assert (tmp_path / "plots" / "page-curves.png").read_bytes().startswith(b"\x89PNG")
    # The losses of real training: they fall, and the ways differ by rounding alone.
    curves = {way: records[f"quick_curves_llama-3.2-1b_{way}"].result for way in CURVE_WAYS}
    exact = torch.tensor(curves["float32"]["losses"])
    assert exact[-1] < exact[0] < 6
    for way, result in curves.items():
        assert (torch.tensor(result["losses"]) - exact).abs().max() < 0.02
        assert bool(result["ops"]) == (way in ("fused", "liger"))
    assert "0.0 min, 1/8: steps tiny none eager ..." in said


def quick_steps(folder: Path, *more: object) -> int:
    return report("--quick", "--only", "steps", "--records", folder, *more)


@pytest.fixture
def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Name of a measurement -> the outcome of its process, in place of one, in which a record of
    STEP is made by default; and in "made" the names of those that were made, a list a process."""
    outcomes: dict[str, Any] = {"made": []}

    class Process:
        def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
            self.names = arguments[arguments.index("--one") + 1 : arguments.index("--records")]
            self.gpu = environment.get("CUDA_VISIBLE_DEVICES")

        def outcome(self, timeout: float) -> Any:
            outcomes["made"].append(self.names)
            for name in self.names:
                outcome = outcomes.get(name, STEP)
                outcome = outcome(name) if callable(outcome) else outcome
                if isinstance(outcome, BaseException):
                    raise outcome
                if isinstance(outcome, str):
                    return {"error": outcome}
                time.sleep(0.01)
                store(tmp_path, recorded(name, STEP | {"gpu": self.gpu}, "CPU"))
            return ""

        def kill(self) -> None:
            pass

        def end(self) -> None:
            pass

    monkeypatch.setattr(command_line, "FreshProcess", Process)
    monkeypatch.setattr(command_line, "device_name", lambda: "CPU")
    monkeypatch.setattr("liger_ops.bench.report.plan.device_name", lambda: "CPU")
    return outcomes


def step(way: str) -> str:
    return f"quick_steps_tiny_none_{way}"


def test_an_interrupted_run_goes_on(tmp_path: Path, outcomes: dict[str, Any]) -> None:
    outcomes[step("fused")] = KeyboardInterrupt()
    assert quick_steps(tmp_path) == 0
    text = next(tmp_path.glob("*.md")).read_text()
    assert "7 of 8 measurements" in text and "- steps tiny none: fused" in text
    outcomes |= {step("fused"): STEP, "made": []}
    assert quick_steps(tmp_path) == 0
    assert outcomes["made"] == [[step("fused")]]
    text = next(tmp_path.glob("*.md")).read_text()
    assert "6 of 8 measurements" in text


def test_what_fails_is_recorded_and_does_not_end_the_run(
    tmp_path: Path, outcomes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes[step("eager")] = "torch.OutOfMemoryError: CUDA out of memory"
    assert quick_steps(tmp_path) == 0
    outcomes[step("fused")] = "RuntimeError: broken"
    (tmp_path / f"{step('fused')}.json").unlink()
    assert quick_steps(tmp_path) == 1
    assert "step of tiny, none, fused: RuntimeError: broken" in capsys.readouterr().err
    text = next(tmp_path.glob("*.md")).read_text()
    assert "| Llama (`tiny`) | failed | failed |" in text
    assert "- step of tiny, none, eager: torch.OutOfMemoryError: CUDA out of memory" in text
    outcomes |= {step("eager"): STEP, step("fused"): STEP, "made": []}
    assert quick_steps(tmp_path) == 1 and outcomes["made"] == []
    assert quick_steps(tmp_path, "--retry") == 0
    assert outcomes["made"] == [[step("eager")], [step("fused")]]
    assert "What failed" not in next(tmp_path.glob("*.md")).read_text()


def test_a_run_ends_when_its_time_is_over(
    tmp_path: Path, outcomes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    quick_steps(tmp_path)
    (tmp_path / f"{step('fused')}.json").unlink()
    outcomes["made"].clear()
    assert quick_steps(tmp_path, "--minutes", "1e-12") == 0
    assert outcomes["made"] == []
    assert "the time is over, 1 measurements are left" in capsys.readouterr().err
    # The page alone.
    assert quick_steps(tmp_path, "--minutes", "0") == 0 and outcomes["made"] == []


def test_a_process_that_dies_is_a_failure_of_its_measurement_alone(
    tmp_path: Path, outcomes: dict[str, Any]
) -> None:
    names = [f"quick_curves_llama-3.2-1b_{way}" for way in CURVE_WAYS]
    outcomes[names[1]] = "exit status -11, no message"
    assert report("--quick", "--only", "curves", "--records", tmp_path) == 0
    assert outcomes["made"] == [names, names[2:]]
    errors = {name: found.error for name, found in load(tmp_path).items()}
    assert errors == dict.fromkeys(names, "") | {names[1]: "exit status -11, no message"}


def test_gpus_measure_at_once_and_the_masked_batches_of_a_way_share_a_process(
    tmp_path: Path, outcomes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = [one for one in plan() if one.part == "steps" and one.words[0] == "mistral"]
    monkeypatch.setattr(command_line, "quick_plan", lambda on_gpu: planned)
    monkeypatch.setattr(command_line, "_gpus", lambda count: ["0", "1"])
    monkeypatch.setattr(command_line, "lacks", lambda package, on_gpu: "")
    assert quick_steps(tmp_path, "--gpus", 2) == 0
    records = load(tmp_path)
    assert records.keys() == {one.name for one in planned}
    assert {found.result["gpu"] for found in records.values()} == {"0", "1"}
    assert sorted(map(len, outcomes["made"])) == [1, 1, 1, 1, 1, 3, 3]
    for names in outcomes["made"]:
        assert len({records[name].result["gpu"] for name in names}) == 1
    masked = [f"steps_mistral_{batch}_liger" for batch in BATCHES[1:]]
    assert masked in outcomes["made"]


def test_what_does_not_fit_beside_another_process_is_measured_alone(
    tmp_path: Path, outcomes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits_alone(name: str) -> Any:
        run = next(run for run in runs if name in {one.name for one in run.wanted})
        return STEP if run.workers == 1 else "torch.OutOfMemoryError: CUDA out of memory"

    runs: list[Any] = []

    class Shared(command_line._Measuring):
        def all(self, wanted: Any, *others: Any) -> None:
            self.wanted, self.workers = wanted, 2
            runs.append(self)
            super().all(wanted, *others)

    monkeypatch.setattr(command_line, "_Measuring", Shared)
    outcomes[step("fused")] = fits_alone
    assert quick_steps(tmp_path) == 0
    assert outcomes["made"].count([step("fused")]) == 2
    assert outcomes["made"].count([step("eager")]) == 1
    assert not any(found.error for found in load(tmp_path).values())


@pytest.mark.skipif(not turns.HAS_TURNS, reason="Windows has no flock")
def test_a_process_has_its_turn_but_while_it_compiles(tmp_path: Path) -> None:
    import fcntl

    file = tmp_path / "turn"
    turn, other = turns.Turn(file), file.open("a")

    def is_free() -> bool:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(other, fcntl.LOCK_UN)
        return True

    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(is_free())

        def run(*args: Any) -> Any:
            seen.append(is_free())
            return graph(*args)

        return run

    try:
        seen.append(is_free())
        with turn:
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
        torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
        seen.append(is_free())
    finally:
        callbacks = turns.compilation_callbacks
        callbacks.remove_start_callback(turn._begin_compilation)
        callbacks.remove_end_callback(turn._end_compilation)
    assert seen == [True, True, False, True]
    # Time in which another process has its turn is not counted.
    fcntl.flock(other, fcntl.LOCK_EX)
    before = turn.clock(), time.perf_counter()
    threading.Timer(0.3, fcntl.flock, (other, fcntl.LOCK_UN)).start()
    with turn:
        counted, passed = turn.clock() - before[0], time.perf_counter() - before[1]
    assert passed > 0.25 and counted < 0.1


def test_the_records_beside_a_page_can_be_taken(tmp_path: Path, outcomes: dict[str, Any]) -> None:
    assert quick_steps(tmp_path, "--page", tmp_path / "page.md") == 0
    made, other = load(tmp_path), tmp_path / "other"
    newer = replace(made[step("eager")], at="2026-02-03 04:05:06")
    other.mkdir()
    store(other, newer)
    outcomes["made"].clear()
    assert quick_steps(other, "--take", tmp_path / "page.jsonl", "--minutes", "0") == 0
    assert outcomes["made"] == [] and load(other) == made | {newer.name: newer}


def recorded(name: str, result: dict[str, Any], device: str = GPU, **more: Any) -> Record:
    found = Record(
        name=name, result=result, error="", seconds=30.0, device=device, commit="abc",
        sources="123", versions={"torch": "2.11.0", "liger-kernel": "0.8.5"},
        at="2026-01-02 03:04:05",
    )  # fmt: skip
    return replace(found, **more)


def test_a_page_shows_the_figures_of_a_gpu(tmp_path: Path) -> None:
    def padded(way: str, **changes: Any) -> Record:
        return recorded(f"steps_qwen3_padded_{way}", STEP | changes)

    curve = [3.0, 2.0] * 20
    found = [
        padded("compile", ms=260.0),
        replace(padded("liger"), commit="def+"),
        padded("fused", losses=[5.5, 5.4, 5.3, 5.25]),
        padded("liger-kernel", losses=[float("nan")] * 4),
        recorded("steps_gemma3_padded_liger", STEP),
        *(
            recorded(f"curves_qwen3_{way}", {"losses": losses, "ops": {}, "size": [40, 8, 512]})
            for way, losses in (
                ("float32", curve),
                ("bfloat16", [loss + 0.01 for loss in curve]),
                ("fused", curve[:39] + [4.0]),
            )
        ),
        recorded(
            "kernels_rms_norm_8192x4096",
            {
                "points": files.as_records(
                    [
                        *rates(), *timed("liger_ops", 0.5, 90.0, mode="full"),
                        *timed("eager", 0.25, 180.0, mode="full"),
                    ],
                    GPU, "now", "0.1.0",
                ),
                "missing": {"quack": "ModuleNotFoundError: No module named 'quack'"}, "lost": [],
            },
        ),
    ]  # fmt: skip
    records = {one.name: one for one in found}
    failed = page.write(tmp_path / "h200.md", plan(), records, "the command")
    text = (tmp_path / "h200.md").read_text()
    assert "Measured at commit abc, but 1 at commit def+. A + behind" in text
    assert "liger-kernel 0.8.5" in text and "not installed" not in text
    assert "231.0 ms (230.0 to 235.0), 27.2 GiB |" in text
    gemma = next(line for line in text.splitlines() if line.startswith("| Gemma3Text"))
    assert gemma.endswith("27.2 GiB, losses not compared |  |")
    qwen = next(line for line in text.splitlines() if line.startswith("| Qwen3 (`qwen3`) | 260"))
    assert qwen.count("other losses") == 2 and qwen.count(" ms ") == 2
    assert failed == [f"step of qwen3, padded, fused: losses {[5.5, 5.4, 5.3, 5.25]}, not {LOSSES}"]
    # The last of 40 losses differs by 2, which a mean of 20 makes 0.1.
    assert "| Qwen3 (`qwen3`) | untouched, bfloat16 | 2.5100 | 2.5100 | 1.0e-02 |  |" in text
    assert "| Qwen3 (`qwen3`) | `fuse`, bfloat16 | 2.5000 | 2.6000 | 1.0e-01 | 9.0e-02 |" in text
    assert "| `rms_norm` 32768x4096 | ms | 0.500 90% | 0.250 180% |" in text
    assert "1 of 1 rows" in text and "eager 0.250 ms, liger_ops 0.500: 100% more" in text
    assert f"{len(plan()) - len(found)} of {len(plan())} measurements:" in text
    without = {name: replace(one, versions={"torch": "2.11.0"}) for name, one in records.items()}
    page.write(tmp_path / "h200.md", plan(), without, "the command")
    assert "Liger-Kernel was not installed" in (tmp_path / "h200.md").read_text()


def test_the_plan_has_ten_families_under_every_batch_and_each_measurement_once() -> None:
    planned = plan()
    assert len(FAMILIES) == 10
    assert {one.words[:2] for one in planned if one.part == "steps"} == {
        (family, batch) for family in FAMILIES for batch in BATCHES
    }
    assert len({one.name for one in planned}) == len(planned)
    # The README's table comes first.
    assert [one.words[:2] for one in planned[:7]] == [("llama-3.2-1b", "none")] * 7
    # Those of a process are made one after another.
    groups = [name for name, _ in groupby(planned, key=lambda one: one.process)]
    assert len(set(groups)) == len(groups)


def test_batches_with_a_mask_find_the_kernels_of_the_batch_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def started(arguments: list[str], environment: dict[str, str]) -> None:
        cache = Path(environment["TRITON_CACHE_DIR"])
        found.append(cache.exists())
        cache.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(command_line, "FreshProcess", started)
    for way, batch in (
        ("liger", "none"),
        ("liger", "ones"),
        ("compile", "ones"),
        ("liger", "none"),
    ):
        measurement = Measurement("steps", ("qwen3", batch, way))
        command_line._Process([measurement], 1, tmp_path, "", "", tmp_path)
    assert found == [False, True, False, False]


def test_the_readme_shows_rows_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text().partition("\n## Benchmarks\n")[2]
    rows = [line for line in readme.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    page = set((ROOT / "docs/reports/h200.md").read_text().splitlines())
    assert len(rows) > 30 and [row for row in rows if row not in page] == []


def test_the_readme_shows_steps_of_the_page() -> None:
    page_of = {found.name: found.result for found in read_all(ROOT / "docs/reports/h200.jsonl")}
    table = (ROOT / "README.md").read_text().partition("| training step, Llama-3.2-1B")[2]
    rows = [line.split("|")[1:-1] for line in table.partition("\n\n")[0].splitlines()[2:]]
    ways = ("eager", "compile", "liger-kernel", "liger", "enabled", "fused")
    for (_, *figures), way in zip(rows, ways, strict=True):
        result = page_of[f"steps_llama-3.2-1b_none_{way}"]
        assert [text.strip() for text in figures] == [f"{result[key]:.1f}" for key in ("ms", "gib")]


@pytest.mark.parametrize("family", CURVES)
def test_the_ways_of_a_curve_begin_with_the_same_parameters(family: str) -> None:
    one, other = (measured.curve_model(family, way, True, "cpu") for way in ("float32", "fused"))
    exact = one.state_dict()
    assert one.dtype == torch.float32 and other.dtype == torch.bfloat16
    for name, value in other.state_dict().items():
        assert torch.equal(value, exact[name].bfloat16())


def test_the_text_is_a_whole_book_with_its_licence_beside_it() -> None:
    text = measured.BOOK.read_bytes()
    assert text.isascii() and 400_000 < len(text) < 500_000
    assert text.startswith(b"PARADISE LOST\nBOOK I.") and text.rstrip().endswith(b"THE END.")
    licence = measured.BOOK.with_name("paradise_lost_license.txt").read_text()
    assert "public domain" in licence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        ([], "PyTorch finds no GPU on this machine; --quick tries every part on a CPU"),
        (["--only", "steps,tails"], "part 'tails' is none of steps, curves, heads, kernels"),
        (["--minutes", "0"], "--minutes 0 needs --records"),
        (["--quick", "--gpus", "2", "--records", "{folder}/new"], "--gpus 2: 1 is here"),
        (["--minutes", "0", "--records", "{folder}"], "holds no records"),
        (["--quick", "--records", "{folder}/gpu"], f"holds records of {GPU}, and this is CPU"),
        (["--quick", "--records", "{folder}/both"], "holds records of several devices: A, B"),
        (["--quick", "--records", "{folder}/prose"], "one.json holds no record of a report"),
    ),
)
def test_a_bad_argument_gets_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, devices in (("gpu", [GPU]), ("both", ["A", "B"]), ("prose", [])):
        (tmp_path / folder).mkdir()
        for device in devices:
            store(tmp_path / folder, recorded(f"steps_{device}", {}, device))
    (tmp_path / "prose" / "one.json").write_text(json.dumps({"name": "one"}))
    with pytest.raises(SystemExit) as exited:
        report(*(argument.format(folder=tmp_path) for argument in arguments))
    printed = capsys.readouterr().err
    assert exited.value.code == 2 and sentence in printed and printed.count("\n") == 1


def test_a_measurement_is_called_by_its_name() -> None:
    one = Measurement("steps", ("qwen3", "none", "liger"))
    assert (one.name, str(one)) == ("steps_qwen3_none_liger", "steps qwen3 none liger")
    assert one._replace(quick=True).name == "quick_steps_qwen3_none_liger"
    assert page.slug(GPU) == "h200" and page.slug("CPU (x86_64)") == "cpu-x86-64"
