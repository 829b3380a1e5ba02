"""The bench of training steps reports its settings before any way is run."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of transformers")
from liger_ops.bench.steps import attention, heads, model, products

RESULT = {
    "losses": [1.0], "warm_up_s": 9.0, "ms": 1.0, "ms_20": 1.0, "ms_80": 1.0, "gib": 0.5,
    "device": "some",
}  # fmt: skip
TRITON = ["torch>=2.1.2", "triton>=2.3.1", 'nvidia-cutlass-dsl>=4.6; extra == "cutedsl"']
CUTLASS = ["einops", "nvidia-cutlass-dsl<5,>=4.7"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that were run, by stand-ins of their processes."""
    ways: list[str] = []

    class Step:
        def __init__(self, way: str, options: Any) -> None:
            ways.append(way)

        def measured(self) -> dict[str, Any]:
            return dict(RESULT)

    monkeypatch.setattr(model, "FreshStep", Step)
    return ways


@pytest.mark.parametrize(
    ("required", "on_gpu", "said"),
    (
        (TRITON, False, "needs a GPU: its kernels are made with Triton"),
        (CUTLASS, False, "needs a GPU: its kernels are made with CUTLASS"),
        (TRITON, True, ""),
        (["torch", 'triton; extra == "gpu"'], False, ""),
        (None, False, ""),
        (PackageNotFoundError("liger-kernel"), True, "is not installed"),
    ),
)
def test_a_peer_that_cannot_run_here_is_not_started(
    required: Any, on_gpu: bool, said: str, ran: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def requires(package: str) -> Any:
        if isinstance(required, Exception):
            raise required
        return required

    monkeypatch.setattr(model, "requires", requires)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    status = model.main(["eager", "liger-kernel", "--shape", "tiny"])
    assert status == (0 if on_gpu else 2)
    assert ran == (["eager"] if said else ["eager", "liger-kernel"])
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("liger-kernel ")]
    assert len(rows) == 1 and (not said or rows == [f"liger-kernel   {said}"])


def test_each_way_is_told_when_it_starts(
    ran: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    run = model.FreshStep

    def noted(way: str, options: Any) -> Any:
        started.append(capsys.readouterr().err.splitlines())
        return run(way, options)

    monkeypatch.setattr(model, "FreshStep", noted)
    model.main(["eager", "compile", "fused", "fused-compile", "--shape", "tiny"])
    first = "runs, compiled first: a minute or more if nothing is cached ..."
    expected = {"eager": "runs ...", "compile": first, "fused": "runs ...", "fused-compile": first}
    assert started == [[f"{way:14} {text}"] for way, text in expected.items()]
    assert not capsys.readouterr().err


def test_each_head_runs() -> None:
    found = heads.calls(8, 16, 64, 3, "cpu")
    assert list(found) == [
        "linear_cross_entropy", "linear_log_prob", "score centering", "linear_top_k", "forward",
    ]  # fmt: skip
    for call in found.values():
        call()


@pytest.mark.parametrize("bench", (attention, heads, products))
def test_benches_of_a_gpu_say_that_there_is_none(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main([]) == 2
    assert "no" in capsys.readouterr().err


def test_the_chosen_ways_of_attention_run() -> None:
    row = attention.Row((8, 5), 2, 1, 16)
    found = attention.calls(row, "cpu", ["triton", "flash"])
    assert list(found) == ["triton", "flash"]
    assert attention.differs(found["flash"], found["triton"]()) == ""


def test_a_process_ends_with_those_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "started.py").write_text("import sys\nprint(sys.argv[1])\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def process(*arguments: str) -> model.FreshProcess:
        return model.FreshProcess(["started", *arguments], environment)

    assert process("done").outcome() == "done\n"
    assert process().outcome() == {"error": "IndexError: list index out of range"}
    (tmp_path / "started.py").write_text(
        "import sys, time\ntime.sleep(5)\nopen(sys.argv[1], 'w').close()\n"
    )
    waiting, ended = (process(str(tmp_path / name)) for name in ("waited for", "ended"))
    ended.end()
    assert waiting.outcome() == "" and (tmp_path / "waited for").exists()
    assert not (tmp_path / "ended").exists()
    # A process that it started holds its output open.
    (tmp_path / "started.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    )
    began = time.perf_counter()
    assert process().outcome(timeout=1) == {"error": "it was stopped after 1 s"}
    assert time.perf_counter() - began < 30
