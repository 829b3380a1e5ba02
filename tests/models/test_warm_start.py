"""A second start of what is compiled finds everything in the saved cache artifacts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from backends import ROOT, needs_compiler, run

START = """
import json, sys
import torch
import torch.nn.functional as F
import liger_ops
from torch._dynamo.utils import counters
from torch._inductor import config

file, how = sys.argv[1:]
if how == "load":
    with open(file, "rb") as opened:
        torch.compiler.load_cache_artifacts(opened.read())


def compiled(function, *args, **options):
    counters.clear()
    loss = torch.compile(function, **options)(*args)
    loss.backward()
    return [loss.item()] + [
        counters[part][f"{name}_cache_{n}"]
        for part, name in (("aot_autograd", "autograd"), ("inductor", "fxgraph"))
        for n in ("hit", "miss", "bypass")
    ]


def small(rows, **options):
    gate, up = (torch.ones(rows, 8, requires_grad=True) for _ in range(2))
    return compiled(lambda gate, up: (F.silu(gate) * up).sum(), gate, up, **options)


def step(way):
    from causal_models import LLAMA, batch

    model, inputs = LLAMA.model(), batch()
    model.model.layers = model.model.layers[:1]
    if way == "fuse":
        liger_ops.fuse(model)
        return compiled(lambda: model(**inputs).loss)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    # The code that Inductor makes of this graph is tested in test_architectures.
    with config.patch(fallback_by_default=True):
        return compiled(lambda: model(**inputs).loss, backend="liger")


found = {"backend": small(2, backend=liger_ops.backend, options={"rewrites": "all"})}
with liger_ops.enable("all"):
    found["enable"] = small(3)
if how != "small":
    found |= {f"a step by {way}": step(way) for way in ("backend", "fuse")}
if how == "save":
    with open(file, "wb") as opened:
        opened.write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps(found))
"""


@needs_compiler
def test_a_second_start_is_warm(tmp_path: Path) -> None:
    """Functions and whole training steps, by the backend, `enable` and `fuse`, in a process with
    another folder of caches, which has the compiled C++ alone. And a cache miss after any source
    file of the package has changed."""
    package, support = tmp_path / "package", ROOT / "tests" / "support"
    for name in ("liger_ops", "meta", "lowering"):
        shutil.copytree(ROOT / name, package / name)
    paths = [str(package), *map(str, support.glob("*/"))]

    def start(how: str, folder: str) -> dict[str, list[float]]:
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / folder)
        artifacts = str(tmp_path / "artifacts")
        return json.loads(run(START, artifacts, how, root=package, **environment).splitlines()[-1])

    first = start("save", "first")
    for _, *counts in first.values():
        assert counts[:4] == [0, 1, 0, 0] and counts[4] > 0 == counts[5]
    caches = shutil.ignore_patterns("aotautograd", "fxgraph")
    shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=caches)
    warm = {way: [loss, 1, 0, 0, counts[4], 0, 0] for way, (loss, *counts) in first.items()}
    assert start("load", "second") == warm
    with (package / "liger_ops/rewrites/layers/activations.py").open("a") as source:
        source.write("\n# Another version.\n")
    assert start("small", "first") == {way: first[way] for way in ("backend", "enable")}
