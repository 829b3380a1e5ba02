"""The tensors that the backend marks to be saved, and those to be recomputed in the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import liger_ops
from graphs import Recorder, liger_ops_of


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
    # Values are small, so that the softmax is smooth.
    x, words, *parameters = ((torch.randn(shape) / 8).requires_grad_() for shape in shapes)
    return x, words, torch.randint(50, (32,)), *parameters


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> tuple[Counter[str], Counter[str]]:
    """The ops of the forward and of the backward graph; also checks the gradients."""
    graphs = Recorder()
    inner = graphs.backend(partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(
        function, fullgraph=True, backend=liger_ops.backend, options={"inner_backend": inner}
    )
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = torch.autograd.grad(compiled(*inputs), wanted)
    for ours, theirs in zip(found, torch.autograd.grad(function(*inputs), wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return liger_ops_of(graphs.forwards), liger_ops_of(graphs.backwards)


FORWARD = {"rms_norm": 1, "fused_add_rms_norm": 2, "swiglu": 3, "linear_cross_entropy_forward": 1}


def test_without_a_budget_nothing_is_computed_again(inputs: tuple[Tensor, ...]) -> None:
    forward, backward = run(model, inputs)
    assert forward == FORWARD
    assert not set(FORWARD) & set(backward)


@pytest.mark.parametrize("budget", (0.5, 0.1))
def test_with_a_budget_all_but_the_loss_is(inputs: tuple[Tensor, ...], budget: float) -> None:
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = run(model, inputs)
    assert forward == FORWARD
    again = {name: count for name, count in backward.items() if name in FORWARD}
    assert again == {name: FORWARD[name] for name in FORWARD if not name.startswith("linear")}


def test_checkpointed_blocks_leave_the_loss_alone(inputs: tuple[Tensor, ...]) -> None:
    def checkpointed(x: Tensor, words: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, *parameters, use_reentrant=False)
        return head(x, words, target)

    forward, backward = run(checkpointed, inputs)
    assert forward["linear_cross_entropy_forward"] == 1
    assert backward["linear_cross_entropy_forward"] == 0
    assert backward["rms_norm"] == 3
