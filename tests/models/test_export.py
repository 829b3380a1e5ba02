"""`torch.export` of code that calls the ops: they stay whole, and a saved program names them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import liger_ops
from causal_models import LLAMA, batch
from liger_ops.rewrites.graph_pass import refuse_exported

ROOT = Path(__file__).parents[2]


def ops(graph: fx.Graph) -> Counter[str]:
    """The ops of this package in a graph, and ATen's loss ops."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(n for n in names if n.startswith("liger.") or "nll" in n or "cross" in n)


@pytest.mark.parametrize("strict", (True, False))
def test_a_fused_model_keeps_its_ops(strict: bool) -> None:
    model = LLAMA.model()
    fused = Counter(f"liger.{entry.op}.default" for entry in liger_ops.fuse(model).fused)
    assert fused["liger.linear_cross_entropy.default"] == 1
    inputs = {**batch(), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=strict)
    assert ops(program.graph) == fused
    actual, expected = program.module()(**inputs), model(**inputs)
    assert torch.equal(actual.loss, expected.loss)
    grads = [
        torch.autograd.grad(loss, list(m.parameters()))
        for loss, m in ((actual.loss, model), (expected.loss, model))
    ]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


class Calls(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = liger_ops.rms_norm(x)
        loss = liger_ops.linear_cross_entropy(y, weight, target)
        return loss, liger_ops.cross_entropy(y @ weight.T, target)


def call() -> tuple[Tensor, ...]:
    return torch.ones(3, 8), torch.ones(5, 8), torch.tensor([0, 4, -100])


@pytest.mark.parametrize("strict", (True, False))
def test_decomposing_a_program_leaves_the_ops(strict: bool) -> None:
    program = torch.export.export(Calls(), call(), strict=strict)
    names = ("rms_norm", "linear_cross_entropy", "cross_entropy")
    assert ops(program.graph) == Counter(f"liger.{name}.default" for name in names)
    names = ("rms_norm", "linear_cross_entropy_forward", "cross_entropy_forward")
    assert ops(program.run_decompositions().graph) == Counter(
        f"liger.{name}.default" for name in names
    )


LOAD = """
import sys
import torch
try:
    torch.export.load(sys.argv[1])
except RuntimeError:
    print("refused", file=sys.stderr)
import liger_ops
program = torch.export.load(sys.argv[1])
print(program.module()(torch.ones(3, 8), torch.ones(5, 8), torch.tensor([0, 4, -100]))[0].item())
"""


def test_a_saved_program_is_loaded_where_the_package_is_imported(tmp_path: Path) -> None:
    """Without the import, torch's error names the unknown op."""
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Calls(), call(), strict=False), file)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, refused, _ = done.stderr.partition("refused")
    assert refused and "torch.ops.liger.rms_norm.default" in said and "import" in said
    assert float(done.stdout) == pytest.approx(Calls()(*call())[0].item())


def test_a_graph_of_aten_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    x = torch.ones(2, 8)
    program = torch.export.export(model, (x,))
    for graph in (program.graph, program.module().graph, program.run_decompositions().graph):
        with pytest.raises(ValueError, match="graph_pass: .* one of ATen's .*aten.*liger_ops.fuse"):
            refuse_exported(graph)


def test_graphs_of_dynamo_and_of_nothing_are_not() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        graphs.append(module)
        return module

    function = lambda x: torch.ops.aten.relu.default(nn.functional.silu(x)) + 1
    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, 8))
    refuse_exported(graphs[0].graph)
    refuse_exported(fx.symbolic_trace(function).graph)
    refuse_exported(fx.Graph())
