"""Inductor compiles the definitions of ops without a kernel for the call, and calls the others."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import virtualized
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import liger_ops
from backends import needs_compiler, without_caches
from graphs import Recorder, liger_ops_of
from liger_ops import inductor
from liger_ops.library import OPS
from op_checks import FLOAT32_ROUNDINGS

V, D = 70, 16


def test_inductor_knows_every_op_before_it_meets_one() -> None:
    """Up to torch 2.12 Inductor would log the expressions of each op's arguments."""
    assert all(op.overload in lowerings for op in OPS.values())


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_op_is_kept_where_its_kernel_runs(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(shape, device=device, dtype=dtype) for shape in ((4, 8), (8,)))
        graph = make_fx(lambda x, w: liger_ops.rms_norm(x, w))(x, weight)
    assert liger_ops_of([graph]) == Counter(["rms_norm"])
    pass_patterns[0].apply(graph)
    kept = device == "cuda" and dtype is torch.float32
    assert liger_ops_of([graph]) == Counter(["rms_norm"] * kept)


def test_a_package_has_the_definition_of_what_is_not_embedded() -> None:
    """Interpreted kernels cannot be. That of a head is of one chunk, for any number of tokens."""
    loss = partial(liger_ops.linear_cross_entropy, chunk_bytes=9999)
    given = torch.ones(150, D), torch.ones(V, D), torch.zeros(150, dtype=torch.int64)
    head = make_fx(loss, tracing_mode="symbolic")(*given)
    with FakeTensorMode():
        norm = make_fx(lambda x: liger_ops.rms_norm(x))(torch.empty(4, 8, device="cuda"))
    modes = [next(iter(graph.graph.nodes)).meta["val"].fake_mode for graph in (norm, head)]
    guards = len(modes[1].shape_env.guards)
    with (
        pytest.warns(match="definition of rms_norm instead of its kernel") as warned,
        virtualized.V.set_aot_compilation(True),
    ):
        for graph, mode in zip((norm, head), modes, strict=True):
            with virtualized.V.set_fake_mode(mode):
                pass_patterns[0].apply(graph)
    assert len(warned) == 1 and not liger_ops_of([norm, head])
    products = head.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == 1 and len(modes[1].shape_env.guards) == guards


def model(x: Tensor, gate: Tensor, weight: Tensor, words: Tensor, target: Tensor) -> Tensor:
    x = liger_ops.rms_norm(x * 2, weight)
    x = x + liger_ops.swiglu(x @ gate, x)
    row = words.shape[0] * x.element_size()
    return liger_ops.linear_cross_entropy(x, words, target, chunk_bytes=100 * row)


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    shapes = ((rows, D), (D, D), (D,), (V, D))
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return *tensors, torch.randint(V, (rows,))


def results(function: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    loss = function(*given)
    return [loss, *torch.autograd.grad(loss, given[:-1])]


def distances(found: list[Tensor], truth: list[Tensor]) -> list[Tensor]:
    return [(a - b).abs().max() for a, b in zip(found, truth, strict=True)]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_definitions_are_compiled(dtype: torch.dtype) -> None:
    """With their neighbours, and in the chunks of a head. Two sizes give one compilation, and
    results no further from float64 than twice eager's and the roundings of a sum in another
    order."""
    code: list[str] = []
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    rounding = torch.finfo(dtype).eps + FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps
    with without_caches(), patch.object(GraphLowering, "save_output_code", code.append):
        # Two chunks each.
        for rows in (150, 190):
            given = inputs(rows, dtype)
            wide = tuple(x.detach().double().requires_grad_() for x in given[:-1])
            truth = results(model, (*wide, given[-1]))
            found, expected = results(compiled, given), results(model, given)
            bounds = distances(expected, truth)
            for own, bound, true in zip(distances(found, truth), bounds, truth, strict=True):
                assert own <= 2 * bound + rounding * true.abs().max()
    assert counters["stats"]["unique_graphs"] == 1 and len(code) == 2
    assert not any("torch.ops.liger" in text for text in code)
    # The norm is in a kernel with the product before it, and the gate with the sum after it.
    assert "cpp_fused_add_mul_rms_norm" in code[0] or "cpp_fused_mul_rms_norm" in code[0]


def test_the_captured_graph_has_every_op() -> None:
    recorder = Recorder()
    torch._dynamo.reset()
    results(torch.compile(model, backend=recorder.backend()), inputs(150, torch.float32))
    ops = Counter(["rms_norm", "swiglu", "linear_cross_entropy_forward"])
    assert liger_ops_of(recorder.forwards) == ops


def test_what_is_not_traced_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition that needs a size that only the data gives, and one of too many nodes."""

    def of_some(x: Tensor, words: Tensor, target: Tensor) -> Tensor:
        some = x[:, 0] > 0
        return liger_ops.linear_cross_entropy(x[some], words, target[some], chunk_bytes=9999)

    x, _, _, words, target = inputs(150, torch.float32)
    recorder = Recorder(pass_patterns[0].apply)
    for function, given in ((of_some, (x, words, target)), (model, inputs(150, torch.float32))):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = torch.compile(function, backend=recorder.backend(), dynamic=False)(*given)
        torch.testing.assert_close(found, function(*given))
        monkeypatch.setattr(inductor, "MOST_NODES", 30)
    ops = Counter(linear_cross_entropy_forward=2)
    assert liger_ops_of(recorder.forwards) == ops


@needs_compiler
@pytest.mark.parametrize("fullgraph", [False, True])
def test_experts_are_called(fullgraph: bool) -> None:
    """Their definition reads numbers of tokens, which a graph may do only if it is the full one."""

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return liger_ops.moe_experts(x * 2, *weights, *route).square().sum()

    shapes = ((5, D), (3, 2 * D, D), (3, D, D))
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    route = torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    torch._dynamo.reset()
    code: list[str] = []
    with without_caches(), patch.object(GraphLowering, "save_output_code", code.append):
        found = torch.autograd.grad(torch.compile(layer, fullgraph=fullgraph)(*given), given)
    torch.testing.assert_close(found, torch.autograd.grad(layer(*given), given))
    assert ["torch.ops.liger.moe_experts_" in text for text in code] == [True, True]
