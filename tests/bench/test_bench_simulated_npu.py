"""`--device npu` of the bench and of the tests, from end to end on the simulated device.

What a device adds is numbers: the bench runs every measurement here and reports none.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import simulated_npu
from liger_ops.bench import records, timing, workloads
from liger_ops.bench.command_line import main
from liger_ops.bench.show import OF_VALUES, SIMULATED
from liger_ops.bench.workloads import ENTRIES

ROOT = Path(__file__).parents[2]
# liger_ops itself imports it where torch_npu and triton-ascend are installed.
importlib.import_module("liger_ops.lowering.npu")
# One op of each kind, at a small shape.
SMALL = {
    "rms_norm": (6, 64),
    "swiglu": (6, 64),
    "log_softmax": (6, 64),
    "linear_cross_entropy": (7, 16, 50),
}


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "RATE_MATRIX", 16)
    monkeypatch.setattr(timing, "CALLS_OF_A_BURST", 1)
    monkeypatch.setattr(timing, "BURSTS", 2)
    monkeypatch.setattr(timing, "WARM_UPS", 1)
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**10)
    small = {op: replace(ENTRIES[op], small=shape) for op, shape in SMALL.items()}
    monkeypatch.setattr(workloads, "ENTRIES", small)
    with simulated_npu.visible():
        yield


def test_the_bench_runs_whole_and_measures_nothing(
    npu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "run.json", tmp_path / "page.md"
    arguments = "--device npu --shapes small --dtypes float32 --repetitions 1"
    arguments += f" --providers liger_ops,eager,aten --json {file} --docs {page}"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2] == SIMULATED
    points, shared = records.read(file)
    assert shared["gpu"] == "a simulated NPU"
    # Each op is found right, by npu kernels alone, and every measurement is made.
    assert {p.kernel for p in points if p.metric == "error" and p.value} == set(SMALL)
    assert simulated_npu.launched
    assert all(name.startswith("liger_ops.lowering.npu.") for name in simulated_npu.launched)
    made = {(p.kernel, p.metric) for p in points if p.provider == "liger_ops"}
    assert made >= {(op, m) for op in SMALL for m in ("speed", "memory", "host", "graph")}
    # No figure is kept, so that none can be printed or written.
    for point in points:
        assert point.metric in OF_VALUES or (point.value, point.note) == (None, SIMULATED), point
    assert "The device is not measured." in page.read_text()


def test_what_is_wrong_on_the_simulated_npu_is_a_failure(
    npu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(workloads.ENTRIES["rms_norm"], ours=lambda x, w: x * w)
    monkeypatch.setitem(workloads.ENTRIES, "rms_norm", wrong)
    arguments = "--device npu --ops rms_norm --shapes small --dtypes float32 --providers liger_ops"
    assert main(arguments.split()) == 1
    assert "failed: rms_norm 6x64 float32 forward: wrong: " in capsys.readouterr().out


def test_the_tests_run_with_device_npu() -> None:
    """Some of the tests, in a process of their own: `--device` is an option of a whole run."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "npu"),
            *("-k", "npu", "tests/ops/test_library.py"),
            "tests/ops/losses/test_cross_entropy_extremes.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LIGER_OPS_SIMULATED_NPU": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout
