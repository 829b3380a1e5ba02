"""linear_cross_entropy through the dispatcher: compiled, under autocast, on the simulated NPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import simulated_npu
from graphs import Recorder, liger_ops_of
from head_calls import FORWARD, MASKS, call, leaves
from linear_cross_entropy_cases import NO_GRADIENTS, HeadCase


@pytest.mark.parametrize("mask", [mask for mask in MASKS if any(mask)])
def test_compiled_once_and_asked_for_what_is_needed(mask: tuple[bool, ...]) -> None:
    """The graph holds one forward op and no other op; its gradients are multiplied, the weight's
    outside of the backward op. With a frozen head, the forward computes no gradient of the head."""
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: call(list(args)) * 2, fullgraph=True, dynamic=True, backend=recorder.backend()
    )
    for rows in (3, 5):
        args, tensors = leaves(HeadCase(shape=(2, rows), chunk_bytes=88))
        for tensor, wanted in zip(tensors, mask, strict=True):
            tensor.requires_grad_(wanted)
        wanted_of = [tensor for tensor in tensors if tensor.requires_grad]
        expected = torch.autograd.grad(call(args) * 2, wanted_of)
        for a, b in zip(torch.autograd.grad(compiled(*args), wanted_of), expected, strict=True):
            assert torch.equal(a, b)
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert liger_ops_of(recorder.forwards) == {"linear_cross_entropy_forward": 1}
    others = {"linear_cross_entropy_backward": 1} if mask[0] or mask[2] else {}
    assert liger_ops_of(recorder.backwards) == others
    (node,) = (
        node
        for node in recorder.forwards[0].graph.nodes
        if "linear_cross_entropy_forward" in str(node.target)
    )
    assert node.args[17] == [*mask, False, False]


def test_compiled_without_gradients_computes_none() -> None:
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: call(list(args)), fullgraph=True, backend=recorder.backend()
    )
    args, _ = leaves(HeadCase())
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), call(args))
    graphs = recorder.forwards + recorder.backwards
    (node,) = (n for graph in graphs for n in graph.graph.nodes if "liger" in str(n.target))
    assert len(node.args) < 18 or node.args[17] == NO_GRADIENTS


def test_autocast_on_the_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    args, _ = leaves(HeadCase(class_weight=True, token_weight=True))
    args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    narrow = [arg.bfloat16() if i in (0, 1, 3) else arg for i, arg in enumerate(args)]
    with torch.autocast("npu", torch.bfloat16):
        on_npu = call([simulated_npu.to_npu(arg) for arg in args])
    torch.testing.assert_close(simulated_npu.to_cpu(on_npu), call(narrow))


def test_flops_of_symbolic_sizes_are_a_symbol() -> None:
    """Inductor estimates the time of a node with dynamic shapes, which must not become static."""
    counts = []

    def count(x: Tensor, weight: Tensor, target: Tensor) -> None:
        with FlopCounterMode(display=False) as counter:
            FORWARD.overload(x, weight, target)
        counts.append(counter.get_total_flops())

    make_fx(count, tracing_mode="symbolic")(torch.ones(6, 8), torch.ones(11, 8), torch.arange(6))
    assert isinstance(counts[0], torch.SymInt) and counts[0] == 2 * 6 * 8 * 11
