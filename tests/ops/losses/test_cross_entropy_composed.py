"""The composed op cross_entropy: one node in a graph, compiled like its part, and transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from graphs import Recorder, liger_ops_of


def test_the_composed_op_is_one_node_and_its_part_is_compiled() -> None:
    seen: list[str] = []
    recorder = Recorder()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return recorder.backend()(graph, inputs)

    def model(x: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.cross_entropy(x, target, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5):
        x = torch.randn(rows, 7, requires_grad=True)
        target = torch.arange(rows)
        losses_ = [f(x, target) for f in (compiled, model)]
        assert torch.equal(*losses_)
        assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in losses_))
    assert seen == ["liger.cross_entropy"]
    assert liger_ops_of(recorder.forwards) == {"cross_entropy_forward": 1}
    assert liger_ops_of(recorder.backwards) == {"cross_entropy_backward": 1}


def test_the_composed_op_under_transforms() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    target = torch.tensor([1, 4])

    def ours(x: Tensor) -> Tensor:
        return liger_ops.cross_entropy(x, target, label_smoothing=0.1)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target, label_smoothing=0.1)

    compare = torch.testing.assert_close
    compare(torch.vmap(torch.func.grad(ours))(x), torch.vmap(torch.func.grad(theirs))(x))
    compare(torch.func.hessian(ours)(x[0]), torch.func.hessian(theirs)(x[0]))
    tangent = torch.ones_like(x[0])
    compare(*(torch.func.jvp(f, (x[0],), (tangent * x[1],)) for f in (ours, theirs)))
    inner = x[0].requires_grad_()
    assert torch.autograd.gradcheck(ours, inner) and torch.autograd.gradgradcheck(ours, inner)
