"""`graph_pass` rewrites as the backend does, and both keep PyTorch's caches."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from torch import fx

import liger_ops
from backends import ROOT, inputs, model, needs_compiler, run, without_caches
from liger_ops.rewrites import REWRITES
from liger_ops.rewrites import graph_pass as pass_module
from rewriting import Rewriter

pytestmark = pytest.mark.usefixtures("empty_caches")


def test_a_pass_makes_the_same_rewrites():
    whole, parts = Rewriter(), []

    def pass_backend(module: fx.GraphModule, example_inputs: Any) -> Any:
        liger_ops.graph_pass("all")(module.graph)
        module.recompile()
        parts.append(module)
        return module.forward

    torch.testing.assert_close(
        torch.compile(model, backend=pass_backend)(*inputs()), model(*inputs())
    )
    torch._dynamo.reset()
    torch.compile(model, backend=whole)(*inputs())
    targets = lambda graph: [str(node.target) for node in graph.graph.nodes]
    assert targets(parts[0]) == targets(whole.graphs[0])
    assert whole.counts() == {"rms_norm": 1, "swiglu": 1}


@needs_compiler
def test_a_pass_in_inductor(monkeypatch):
    reports = []

    def recorded(*args: Any, **options: Any) -> Any:
        reports.append(rewrite(*args, **options))
        return reports[-1]

    rewrite = pass_module.rewrite
    monkeypatch.setattr(pass_module, "rewrite", recorded)
    graph_pass = liger_ops.graph_pass("all")
    compiled = torch.compile(model, options={"pre_grad_custom_pass": graph_pass})
    with without_caches():
        torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert [report.counts() for report in reports] == [{"rms_norm": 1, "swiglu": 1}]


def test_the_uuid_of_a_pass():
    """Equal for the same rewrites in any order, different for other rewrites."""
    uuid = lambda names=None: liger_ops.graph_pass(names).uuid()
    assert uuid() == uuid()
    assert uuid(["rope", "rms_norm"]) == uuid(["rms_norm", "rope"])
    assert uuid("all") == uuid(list(REWRITES))
    assert len({uuid(), uuid("all"), uuid(["rope"]), uuid(["rms_norm"]), uuid([])}) == 5


WARM = """
import json
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
import liger_ops

gate, up = torch.ones(2, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
compiled = torch.compile(
    lambda gate, up: F.silu(gate) * up, backend=liger_ops.backend, options={"rewrites": "all"}
)
compiled(gate, up).sum().backward()
aot, fx = counters["aot_autograd"], counters["inductor"]
print(json.dumps([
    aot["autograd_cache_hit"], aot["autograd_cache_miss"], aot["autograd_cache_bypass"],
    fx["fxgraph_cache_miss"], fx["fxgraph_cache_bypass"],
]))
"""


@needs_compiler
def test_a_second_start_is_warm(tmp_path):
    """And a cache miss after any source file of the package has changed."""
    package = tmp_path / "package"
    shutil.copytree(ROOT / "liger_ops", package / "liger_ops", symlinks=False)
    cache = str(tmp_path / "cache")

    def start() -> list[int]:
        output = run(WARM, root=package, TORCHINDUCTOR_CACHE_DIR=cache)
        return json.loads(output.splitlines()[-1])

    hit, miss, bypass, fx_miss, fx_bypass = start()
    assert (hit, miss, bypass, fx_bypass) == (0, 1, 0, 0) and fx_miss > 0
    assert start() == [1, 0, 0, 0, 0]
    with (package / "liger_ops/rewrites/layers/activations.py").open("a") as source:
        source.write("\n# Another version.\n")
    hit, miss, *_ = start()
    assert (hit, miss) == (0, 1)


def test_a_pass_says_of_an_exported_graph_that_it_is_not_one_of_dynamos():
    exported = torch.export.export(torch.nn.RMSNorm(8, eps=1e-6), (torch.ones(2, 8),))
    with pytest.raises(ValueError, match="graph_pass: the graph must be one of Dynamo's"):
        liger_ops.graph_pass()(exported.graph_module.graph)
