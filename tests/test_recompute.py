"""What the backend marks to be saved, and what to be computed again in the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import liger_ops


class Partitioned:
    """An inner backend that counts the ops of the forward and the backward graph."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = aot_autograd(
            fw_compiler=self._counting(self.forward),
            bw_compiler=self._counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiled(module, inputs)

    @staticmethod
    def _counting(counts: Counter[str]) -> Callable[..., Any]:
        def count(module: fx.GraphModule, inputs: list[Any]) -> Any:
            for node in module.graph.nodes:
                if getattr(node.target, "namespace", None) == "liger":
                    counts[node.target._opname] += 1
            return make_boxed_func(module.forward)

        return count


def block(x: Tensor, weight: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    y = F.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def head(x: Tensor, words: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, words).float(), target)


def model(x: Tensor, words: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
    for _ in range(3):
        x = block(x, *parameters)
    return head(x, words, target)


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((32, 16), (50, 16), (16,), (24, 16), (24, 16), (16, 24))
    # Small enough for the softmax to be smooth.
    x, words, *parameters = ((torch.randn(shape) / 8).requires_grad_() for shape in shapes)
    return x, words, torch.randint(50, (32,)), *parameters


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Partitioned:
    """Compile and run; the gradients are those of the function."""
    inner = Partitioned()
    compiled = torch.compile(
        function, fullgraph=True, backend=liger_ops.backend, options={"inner_backend": inner}
    )
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = torch.autograd.grad(compiled(*inputs), wanted)
    for ours, theirs in zip(found, torch.autograd.grad(function(*inputs), wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return inner


FORWARD = {"rms_norm": 1, "fused_add_rms_norm": 2, "swiglu": 3, "linear_cross_entropy_forward": 1}


def test_without_a_budget_nothing_is_computed_again(inputs: tuple[Tensor, ...]) -> None:
    inner = run(model, inputs)
    assert inner.forward == FORWARD
    assert not set(FORWARD) & set(inner.backward)


@pytest.mark.parametrize("budget", (0.5, 0.1))
def test_with_a_budget_all_but_the_loss_is(inputs: tuple[Tensor, ...], budget: float) -> None:
    with functorch_config.patch(activation_memory_budget=budget):
        inner = run(model, inputs)
    assert inner.forward == FORWARD
    again = {name: count for name, count in inner.backward.items() if name in FORWARD}
    assert again == {name: FORWARD[name] for name in FORWARD if not name.startswith("linear")}


def test_checkpointed_blocks_leave_the_loss_alone(inputs: tuple[Tensor, ...]) -> None:
    def checkpointed(x: Tensor, words: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, *parameters, use_reentrant=False)
        return head(x, words, target)

    inner = run(checkpointed, inputs)
    assert inner.forward["linear_cross_entropy_forward"] == 1
    assert inner.backward["linear_cross_entropy_forward"] == 0
    assert inner.backward["rms_norm"] == 3
