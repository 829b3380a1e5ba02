"""torchtitan's own trainer, with its debug models, with the overrides and without."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SECONDS = 300
NAMES = ("rms_norm", "swiglu", "grouped_experts", "cross_entropy")
OVERRIDES = ",".join(f"liger_ops.integrations.torchtitan.{name}" for name in NAMES)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: it pins an older datasets than these tests have",
)


def trained(ranks: int, results: Path, arguments: list[str]) -> dict[str, Any]:
    """Return what torchtitan_cpu.py writes. A process trains once."""
    script = ROOT / "tests/support/torchtitan_cpu.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), script, results, *arguments),
        ],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize(
    ("ranks", "model", "options", "bound"),
    [
        (2, "llama3 llama3_debugmodel", "", 1e-6),
        (2, "llama3 llama3_debugmodel", "--compile.enable --compile.backend inductor", 1e-6),
        (2, "llama3 llama3_debugmodel_ce_loss", "--parallelism.tensor_parallel_degree 2", 1e-6),
        (4, "llama3 llama3_debugmodel", "--parallelism.tensor_parallel_degree 2", 1e-6),
        (2, "qwen3 qwen3_debugmodel", "--parallelism.tensor_parallel_degree 2", 1e-6),
        # torchtitan computes experts in bfloat16.
        (2, "deepseek_v3 deepseek_v3_debugmodel", "", 1e-4),
    ],
)
@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_the_trainer(
    ranks: int, model: str, options: str, bound: float, backend: str, tmp_path: Path
) -> None:
    if backend == "spmd_types" and torch.__version__ < "2.14":
        pytest.skip("fully_shard takes the parameters of spmd_types since PyTorch 2.14")
    module, config = model.split()
    arguments = ["--module", module, "--config", config, *options.split()]
    arguments += ["--parallelism.spmd_backend", backend]
    overrides = ["--override.imports", OVERRIDES]
    theirs, ours = (
        trained(ranks, tmp_path / f"{index}.json", [*arguments, *added])
        for index, added in enumerate(([], overrides))
    )
    assert len(ours["steps"]) == 3
    for step, expected in zip(ours["steps"], theirs["steps"], strict=True):
        assert step == pytest.approx(expected, rel=bound)
    assert not theirs["ops"]
    called = {f"{op}_backward" for op in ("rms_norm", "swiglu", "cross_entropy")}
    assert called <= ours["ops"].keys()
    assert sum(ours["collectives"].values()) <= sum(theirs["collectives"].values())
