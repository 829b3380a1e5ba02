"""The bench's command line shows earlier runs again, and refuses arguments in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench_points import SHARED, full_house, point
from liger_ops.bench import records, show
from liger_ops.bench.command_line import main

ROOT = Path(__file__).parents[2]


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
    assert show.blocks(full_house()) in printed
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
        (["--providers", "liger_ops,me"], "'me' is none of liger_ops, low-memory"),
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
