"""Checks for the tests of the hub's report, in a process with TRITON_INTERPRET=0."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

sys.path.insert(0, str(Path(__file__).parents[1]))
import paths  # noqa: F401

# isort: split
import peer_stand_in
from interpreted_launches import interpreted_launches


def step(x: Tensor, weight: Tensor) -> Tensor:
    return (peer_stand_in.Silu.apply(peer_stand_in.Norm.apply(x, weight, 1e-5)) ** 2).sum()


def launches() -> None:
    """Compare results and gradients of kernels with PyTorch's, eagerly and in one graph."""
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.linspace(0.5, 2, 20).requires_grad_()
    y = torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (20,), weight, 1e-5))
    loss = (y**2).sum()
    expected = [loss, *torch.autograd.grad(loss, (x, weight))]
    written = []

    def find(module: torch.fx.GraphModule, inputs: object) -> object:
        """Keep what PyTorch finds that the launches of a graph write."""
        graphs = (part.graph for part in module.modules() if hasattr(part, "graph"))
        for node in (node for graph in graphs for node in graph.nodes):
            if "tensors_to_clone" in node.kwargs:
                written.append(tuple(node.kwargs["tensors_to_clone"]))
        return module

    compiled = torch.compile(
        step, fullgraph=True, backend=aot_autograd(fw_compiler=find, bw_compiler=find)
    )
    for run in (step, compiled):
        with interpreted_launches():
            actual = run(x, weight)
            actual = [actual, *torch.autograd.grad(actual, (x, weight))]
        torch.testing.assert_close(actual, expected)
    assert sorted(written) == [("dy_ptr",), ("y_ptr",), ("y_ptr",)], written
    try:
        step(x, weight)
    except RuntimeError as error:
        assert "driver" in str(error), error
    else:
        raise AssertionError("a launch ran without a device")


def models(folder: Path, names: list[str]) -> None:
    """Print the cells of models with the layers of a repository, in a line each."""
    import peer_layers
    from trained_models import MODELS

    for name in names:
        print(name, *peer_layers.trained(MODELS[name], folder), sep=" | ")


if __name__ == "__main__":
    models(Path(sys.argv[1]), sys.argv[2:]) if sys.argv[1:] else launches()
