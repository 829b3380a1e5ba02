"""A second start of a compiled training step finds everything in the saved cache artifacts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_ops.bench.training import inductor_works

START = """
import json, sys
import torch
import liger_ops
from causal_models import LLAMA, batch
from torch._dynamo.utils import counters

file, is_first = sys.argv[1], sys.argv[2] == "save"
if not is_first:
    with open(file, "rb") as opened:
        torch.compiler.load_cache_artifacts(opened.read())
losses = []
for way in ("liger", "fused"):
    model, inputs = LLAMA.model(), batch()
    model.model.layers = model.model.layers[:1]
    if way == "fused":
        liger_ops.fuse(model)
    else:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    backend = {"backend": "liger"} if way == "liger" else {}
    loss = torch.compile(lambda **inputs: model(**inputs).loss, **backend)(**inputs)
    loss.backward()
    losses.append(loss.item())
if is_first:
    with open(file, "wb") as opened:
        opened.write(torch.compiler.save_cache_artifacts()[0])
aot, fx = counters["aot_autograd"], counters["inductor"]
names = ("hit", "miss", "bypass")
print(json.dumps([
    losses, [aot["autograd_cache_" + n] for n in names], [fx["fxgraph_cache_" + n] for n in names]
]))
"""


@pytest.mark.skipif(not inductor_works(), reason="Inductor cannot build C++ here")
def test_cache_artifacts_hold_a_whole_training_step(tmp_path: Path) -> None:
    """By the backend with a mask, and by `fuse`; in a process with another, empty cache folder."""

    def start(what: str) -> list[list[float]]:
        done = subprocess.run(
            [sys.executable, "-c", START, str(tmp_path / "artifacts"), what],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / what),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    losses, autograd, graphs = start("save")
    assert autograd == [0, 2, 0] and graphs[0] == graphs[2] == 0 < graphs[1]
    assert start("load") == [losses, [2, 0, 0], [graphs[1], 0, 0]]
