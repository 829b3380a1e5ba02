"""`graph_pass` rewrites as the backend does, and both keep PyTorch's caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import liger_ops
from backends import inputs, model, needs_compiler, without_caches
from liger_ops.rewrites import REWRITES
from liger_ops.rewrites import enable as pass_module
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


def test_a_pass_says_of_an_exported_graph_that_it_is_not_one_of_dynamos():
    exported = torch.export.export(torch.nn.RMSNorm(8, eps=1e-6), (torch.ones(2, 8),))
    with pytest.raises(ValueError, match="graph_pass: the graph must be one of Dynamo's"):
        liger_ops.graph_pass()(exported.graph_module.graph)
