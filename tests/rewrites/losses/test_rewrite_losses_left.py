"""Losses that are not rewritten: of tensor subclasses, and separate from their head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import liger_ops
from liger_ops.rewrites.losses import losses
from loss_spellings import D, head_inputs, labels, transformers
from rewriting import Rewriter, values

V = losses.LEAST_CLASSES


class Model(nn.Module):
    def __init__(self, classes: int = V) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, classes, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return transformers(self.head(x), target)


@pytest.mark.parametrize("layout", [None, Shard(-1)], ids=["product", "redistributed"])
def test_loss_parallel(mesh, layout):
    """A vocabulary that is sharded over devices; PyTorch's own loss sums over the shards."""
    x, _, target = head_inputs()
    model = Model(11)
    before = model(x, target)
    (expected,) = torch.autograd.grad(before, model.head.weight)
    plan = ColwiseParallel(output_layouts=layout, use_local_output=False)
    parallelize_module(model, mesh, {"head": plan})
    torch._dynamo.reset()
    found = Rewriter(["linear_cross_entropy", "cross_entropy"])
    with loss_parallel():
        loss = torch.compile(model, backend=found)(x, target)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), before)
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), expected)
    assert found.counts() == {}
    assert all("is a DTensor" in one.reason for one in found.findings) and found.findings


def warned(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """The warnings for a function's graphs."""
    torch._dynamo.reset()
    found = Rewriter()
    torch.compile(function, backend=found)(*inputs)
    losses._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses.warn(found.findings)
        losses.warn(found.findings)
    return [str(one.message) for one in caught]


def and_logits(model: Model, x: Tensor, target: Tensor) -> Any:
    logits = model.head(x)
    return transformers(logits, target), logits


def and_prediction(model: Model, x: Tensor, target: Tensor) -> Any:
    logits = model.head(x)
    return transformers(logits, target), logits.argmax(-1)


def as_accelerate_wraps_it(model: Model, x: Tensor, target: Tensor) -> Any:
    """In its bf16 mode."""
    accelerate = pytest.importorskip("accelerate", reason="the wrapper is accelerate's")
    convert_outputs_to_fp32 = accelerate.utils.convert_outputs_to_fp32
    forward = convert_outputs_to_fp32(lambda *batch: and_logits(model.bfloat16(), *batch))
    return forward(x.bfloat16(), target)


def in_two_autocasts(model: Model, x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(x)
    return transformers(logits, target)


def in_two_graphs(model: Model, x: Tensor, target: Tensor) -> Tensor:
    logits = model.head(x)
    torch._dynamo.graph_break()
    return transformers(logits, target)


UNFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "returned": (and_logits, "the logits are returned", "returns the loss alone"),
    "accelerate": (as_accelerate_wraps_it, "the logits are returned", "returns the loss alone"),
    "argmax": (and_prediction, "are used by argmax too", "explain"),
    "autocast": (in_two_autocasts, "different gradient or autocast modes", "explain"),
    "graphs": (in_two_graphs, "computed outside of the graph", "without a graph break"),
}


@pytest.mark.parametrize(("step", "reason", "advice"), UNFUSED.values(), ids=UNFUSED)
def test_a_step_whose_loss_stays_unfused_is_warned_of(step, reason, advice):
    model = Model()
    (text,) = warned(lambda x, target: step(model, x, target), values(2, 5, D), labels())
    assert reason in text and advice in text
    # The line of the loss.
    assert "loss_spellings.py" in text and "F.cross_entropy" in text


def test_a_loss_outside_of_the_compiled_model():
    logits = Model().head(values(2, 5, D))
    (text,) = warned(transformers, logits, labels())
    assert "computed outside of the graph" in text


def test_what_is_not_warned_of():
    """A fused loss, few classes, an evaluation, frozen weights, logits that are inputs."""
    model, x, target = Model(), torch.randn(2, 5, D), labels()
    assert warned(model, x, target) == []
    assert warned(lambda x, target: and_logits(Model(11), x, target), x, target) == []
    step = lambda x, target: and_logits(model, x, target)
    with torch.no_grad():
        assert warned(step, x, target) == []
    assert warned(transformers, values(2, 5, V), target) == []
    model.requires_grad_(False)
    assert warned(step, x, target) == []


def test_the_backend_warns():
    model = Model()
    step = lambda x, target: and_logits(model, x, target)
    losses._warned.clear()
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="the logits are returned"):
        torch.compile(step, backend=liger_ops.backend, options={"inner_backend": "eager"})(
            torch.randn(2, 5, D), labels()
        )
