"""Tensor and sequence parallelism by `parallelize_module` train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger_ops
import ranks

pytestmark = pytest.mark.device_kernels

SECONDS = 180
D, HIDDEN, LAYERS = 16, 32, 2
Norm = Callable[[], nn.Module]
Activation = Callable[[Tensor, Tensor], Tensor]


def test_sequence_parallel_norms_and_column_parallel_activations(tmp_path: Path) -> None:
    assert not ranks.failures([check], 2, tmp_path, SECONDS)


class MLP(nn.Module):
    def __init__(self, norm: Norm, activation: Activation) -> None:
        super().__init__()
        self.norm, self.activation = norm(), activation
        self.gate, self.up = (nn.Linear(D, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(self.activation(self.gate(y), self.up(y)))


class Model(nn.Module):
    def __init__(self, norm: Norm, activation: Activation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MLP(norm, activation) for _ in range(LAYERS))
        self.norm = norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def of_ops() -> Model:
    return Model(lambda: liger_ops.nn.RMSNorm(D), liger_ops.swiglu)


def of_torch() -> Model:
    return Model(lambda: nn.RMSNorm(D, eps=1e-6), lambda gate, up: F.silu(gate) * up)


def parallel(model: nn.Module, mesh: object) -> nn.Module:
    columns = {"input_layouts": Shard(1), "use_local_output": False}
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Shard(1)}
    plan: dict[str, object] = {"norm": SequenceParallel()}
    for i in range(LAYERS):
        plan |= {
            f"layers.{i}": PrepareModuleInput(**layouts, use_local_output=False),
            f"layers.{i}.norm": SequenceParallel(),
            f"layers.{i}.gate": ColwiseParallel(**columns),
            f"layers.{i}.up": ColwiseParallel(**columns),
            f"layers.{i}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    return parallelize_module(model, mesh, plan)


def check() -> None:
    mesh = ranks.mesh()

    def local(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor.chunk(2, 1)[dist.get_rank()], mesh, [Shard(1)])

    one = of_ops()
    x, weights = torch.randn(2, 3, 8, D)
    truth = (one(x) * weights).sum()
    truth.backward()
    collectives = []
    for build in (of_torch, of_ops):
        model = parallel(build(), mesh)
        with CommDebugMode() as communication:
            loss = (model(local(x)) * local(weights)).sum()
            loss.backward()
        collectives.append(communication.get_comm_counts())
        compare(loss, model, truth, one)
    # The activations of no norm are gathered.
    assert collectives[0] == collectives[1]
    model = parallel(of_ops(), mesh)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = (compiled(local(x)) * local(weights)).sum()
    loss.backward()
    compare(loss, model, truth, one)


def compare(loss: DTensor, model: nn.Module, truth: Tensor, one: nn.Module) -> None:
    torch.testing.assert_close(loss.full_tensor(), truth, rtol=1e-5, atol=1e-5)
    for found, expected in zip(model.parameters(), one.parameters(), strict=True):
        gradient = found.grad.full_tensor()
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-5, atol=1e-5)
