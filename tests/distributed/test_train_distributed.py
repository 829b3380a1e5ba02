"""`examples/train_distributed.py` on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 400


def test_the_ways_of_a_small_model_agree() -> None:
    ways = ["eager", "fuse", "liger"]
    arguments = ["--way", *ways, "--precision", "float32", "--sequence-length", "16"]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", ROOT / "examples" / "train_distributed.py"),
            *(*arguments, "--shape", "tiny", "--inner-backend", "aot_eager"),
        ],
        # Without a GPU, so that the processes are the same on every machine.
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines] == [[way, "losses"] for way in ways]
    # Nothing is timed.
    assert {len(line) for line in lines} == {6}
    # The ways train: each loss is less than the one before.
    first = [float(loss) for loss in lines[0][2:]]
    assert sorted(first, reverse=True) == first and len(set(first)) == len(first)
