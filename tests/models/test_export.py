"""`torch.export` of code that calls the ops: they stay whole, and a saved program names them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import liger_ops
from causal_models import LLAMA, batch
from fused_families import text
from liger_ops.rewrites.enable import refuse_exported

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


class Logits(nn.Module):
    """A model of transformers as a function of its input alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Loss(Logits):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss


def fused_and_inputs(kind: type[Logits]) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A fused model, a batch of two rows, and dynamic shapes for any number of rows."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    assert liger_ops.fuse(model).fused
    names = ("input_ids", "labels") if kind is Loss else ("input_ids",)
    rows = {0: torch.export.Dim("rows", max=64)}
    return kind(model).eval(), tuple(batch()[name] for name in names), (rows,) * len(names)


def doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat([x, x.flip(-1)]) for x in inputs)


ELSEWHERE = """
import sys
sys.modules["liger_ops"] = None
import torch
expected, *inputs = torch.load(sys.argv[1])
for call in (
    torch.export.load(sys.argv[2]).module(), torch._inductor.aoti_load_package(sys.argv[3])
):
    torch.testing.assert_close(call(*inputs), expected)
print("equal")
"""


def test_a_program_runs_without_the_package(tmp_path: Path) -> None:
    """With twice as many rows. Compiled by AOTInductor, it need not be decomposed."""
    model, inputs, shapes = fused_and_inputs(Loss)
    files = [str(tmp_path / name) for name in ("values.pt", "program.pt2", "package.pt2")]
    with torch.no_grad():
        torch.save((model(*doubled(inputs)), *doubled(inputs)), files[0])
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    assert ops(program.graph)
    torch._inductor.aoti_compile_and_package(program, package_path=files[2])
    program = program.run_decompositions(liger_ops.decompositions())
    assert not ops(program.graph)
    torch.export.save(program, files[1])
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *files], capture_output=True, text=True)
    assert done.stdout.split() == ["equal"], done.stderr


@pytest.mark.parametrize("kind", (Logits, Loss))
def test_a_fused_model_is_exported_to_onnx(kind: type[Logits], tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    from onnxruntime import InferenceSession

    model, inputs, shapes = fused_and_inputs(kind)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, inputs, file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = InferenceSession(file)
    names = [argument.name for argument in session.get_inputs()]
    given = dict(zip(names, (x.numpy() for x in doubled(inputs)), strict=True))
    (found,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(found), model(*doubled(inputs)).detach())


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
