"""The example and the commands of the bench for several devices, on two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 400
# A thread of gloo's that is left aborts a process while it exits, once in some hundred runs.
ABORTED_AT_EXIT = "terminate called without an active exception"


def run(program: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    result = run_once(program, *arguments)
    return run_once(program, *arguments) if ABORTED_AT_EXIT in result.stderr else result


def run_once(program: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", *program, *arguments),
        ],
        # Without a GPU, so that the processes are the same on every machine.
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize(
    ("tp", "ways"), [("1", ["eager", "fuse", "liger", "backend"]), ("2", ["eager", "fuse"])]
)
def test_the_ways_of_a_small_model_agree(tp: str, ways: list[str]) -> None:
    arguments = ["--way", *ways, "--precision", "float32", "--sequence-length", "16", "--tp", tp]
    arguments += ["--shape", "tiny", "--inner-backend", "aot_eager"]
    result = run([str(ROOT / "examples" / "train_distributed.py")], *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
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
def test_the_ways_of_a_sharded_vocabulary_are_right(options: list[str], ways: list[str]) -> None:
    sizes = ["--tokens", "24", "--hidden", "16", "--words", "97"]
    result = run(["-m", "liger_ops.bench.steps.vocabulary"], *sizes, *options, "--way", *ways)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    # 97 words do not divide by two ranks, and packages that are not installed are named.
    assert [re.split(" errors| not run: ", line)[0].rstrip() for line in lines] == ways
    assert all("errors" in line for line in lines[:2])
    assert "WRONG" not in result.stdout


def test_the_ways_of_a_tensor_parallel_layer_are_right() -> None:
    result = run(["-m", "liger_ops.bench.steps.tensor_parallel"])
    assert result.returncode == 0, result.stdout + result.stderr
    ways = ["eager", "inductor", "liger", "fuse", "fuse, liger"]
    assert [line.split(" worst")[0].rstrip() for line in result.stdout.splitlines()] == ways
