"""A CUDA graph captures every op, and a whole model: nothing waits for the device, and a replay
needs nothing from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import liger_ops
from op_checks import clones
from op_table import OPS
from op_under_test import DEVICE, OpUnderTest

pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU: run with --device cuda"),
]


def captured(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The graph of a call, captured after warm-up calls that allocate and compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_a_graph_captures_the_op_and_its_gradient(op: OpUnderTest) -> None:
    """A replay with other values gives bitwise the result of a call with these values."""
    case = op.sample(torch.bfloat16)
    args = list(clones(op.forward_args(case, op.tensors(case))))
    places = [
        i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()
    ]
    leaves = [args[i].requires_grad_() for i in places if op.has_gradient(i)]

    def run() -> list[Tensor]:
        outputs = op.results(op.overload()(*args))
        dys = [torch.full_like(output, 0.5) for output in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, dys)]

    graph, outputs = captured(run)
    with torch.no_grad():
        for i in places:
            args[i].uniform_(0.25, 1.0)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, expected in zip(outputs, run(), strict=True):
        assert torch.equal(replayed, expected)


def test_reduce_overhead_captures_a_fused_model() -> None:
    """CUDA graphs cover the whole model, and the loss equals the untouched model's."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    tokens = torch.randint(1024, (4, 128), device=DEVICE)

    def step(model: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = [parameter.grad.float() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return loss.detach().float().clone(), gradients

    parameters = list(model.parameters())
    expected_loss, expected = step(model)
    fused = {entry.op for entry in liger_ops.fuse(model).fused}
    assert fused >= {"rms_norm", "rope", "swiglu", "linear_cross_entropy"}
    counters.clear()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        loss, gradients = step(compiled)
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=0)
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient - other).norm() <= 5e-2 * other.norm()
