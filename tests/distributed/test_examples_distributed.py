"""The examples for several devices, on two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 400
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# A thread of gloo's that is left aborts a process while it exits, once in some hundred runs.
ABORTED_AT_EXIT = "terminate called without an active exception"


def started_by_torchrun(*words: str) -> str:
    """Return what a program prints; without a GPU, so that all machines have the same processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(2):
        result = subprocess.run(
            [*TORCHRUN, "--nproc-per-node", "2", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if ABORTED_AT_EXIT not in result.stderr:
            break
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def started(folder: Path, *words: str) -> str:
    """The same, in processes that the tests of ranks start, which have imported PyTorch."""
    codes, output = ranks.program(2, folder, SECONDS, *words)
    assert codes == [0, 0], output
    return output


@pytest.mark.parametrize(
    ("tp", "ways"), [("1", ["eager", "fuse", "liger", "backend"]), ("2", ["eager", "fuse"])]
)
def test_the_ways_of_a_small_model_agree(tp: str, ways: list[str], tmp_path: Path) -> None:
    arguments = [str(EXAMPLES / "train_distributed.py")]
    arguments += ["--way", *ways, "--precision", "float32", "--sequence-length", "16", "--tp", tp]
    arguments += ["--shape", "tiny", "--inner-backend", "aot_eager"]
    output = started(tmp_path, *arguments) if tp == "2" else started_by_torchrun(*arguments)
    lines = [line.split() for line in output.splitlines()]
    assert [line[:2] for line in lines] == [[way, "losses"] for way in ways]
    # Nothing is timed.
    assert {len(line) for line in lines} == {6}
    # The ways train: each loss is less than the one before.
    first = [float(loss) for loss in lines[0][2:]]
    assert sorted(first, reverse=True) == first and len(set(first)) == len(first)


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (
            [],
            ["linear_cross_entropy", "linear_log_prob", "linear, loss_parallel"]
            + ["linear, Megatron", "linear, torchtitan", "verl"],
        ),
        (["--divergence", "jsd"], ["linear_divergence", "linear, divergence"]),
    ],
)
def test_the_ways_of_a_sharded_vocabulary_are_right(
    options: list[str], ways: list[str], tmp_path: Path
) -> None:
    sizes = ["--tokens", "24", "--hidden", "16", "--words", "97"]
    words = [str(EXAMPLES / "time_vocabulary.py"), *sizes, *options, "--way", *ways]
    output = started(tmp_path, *words) if options else started_by_torchrun(*words)
    lines = output.splitlines()
    # 97 words do not divide by two ranks, and packages that are not installed are named.
    assert [re.split(" errors| not run: ", line)[0].rstrip() for line in lines] == ways
    assert all("errors" in line for line in lines[:2])
    assert "WRONG" not in output


def test_the_ways_of_a_tensor_parallel_layer_are_right(tmp_path: Path) -> None:
    output = started(tmp_path, str(EXAMPLES / "time_tensor_parallel.py"))
    ways = ["eager", "inductor", "liger", "fuse", "fuse, liger"]
    assert [line.split(" worst")[0].rstrip() for line in output.splitlines()] == ways
