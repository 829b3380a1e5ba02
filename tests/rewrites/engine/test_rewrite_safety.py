"""A rewrite does not erase or move unmatched nodes, change its surroundings, or fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import liger_ops
from backends import Inner, inputs, model
from liger_ops import rewrites as passes
from liger_ops.rewrites.engine.report import Report
from rewriting import Rewriter, check, refused, values
from rotations import applied, heads, phi3, tables

pytestmark = pytest.mark.usefixtures("empty_caches")


def graph_of(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """The graph that Dynamo captures of a function."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(module)
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return found[0]


def test_no_dead_code_is_eliminated(monkeypatch):
    """fx's dead code elimination drops writes in subgraphs, and nodes that no rewrite matched."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = model(x, weight)
        y.mul_(3)
        return y

    module = graph_of(lambda x, w: checkpoint(block, x, w, use_reentrant=False), *inputs())

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("dead code was eliminated")

    monkeypatch.setattr(fx.Graph, "eliminate_dead_code", forbidden)
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    for part in parts:
        (output,) = (node for node in part.graph.nodes if node.op == "output")
        with part.graph.inserting_before(output):
            part.graph.call_function(torch.ones, (2,), name="unused")
    assert passes.rewrite(module).counts() == {"rms_norm": 1, "swiglu": 1}
    names = [node.name for part in parts for node in part.graph.nodes]
    assert "mul_" in names and sum(name.startswith("unused") for name in names) == len(parts) == 2


def test_writes_in_blocks_stay():
    """A write in a checkpointed block, or in the backward of an autograd function."""

    def block(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(3)
        return y

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            dx = dy * 2
            dx.mul_(5)
            return dx

    options = {"inner_backend": "aot_eager"}
    for use_reentrant in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, how=use_reentrant: checkpoint(block, x, use_reentrant=how).sum(),
            backend=liger_ops.backend,
            options=options,
        )
        assert compiled(torch.ones(4, 4, requires_grad=True)).item() == 96
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: Function.apply(x).sum(), backend=liger_ops.backend, options=options)(
        x
    ).backward()
    assert x.grad is not None and x.grad.tolist() == [10, 10]


def spoilt(graph: fx.Graph, report: Report) -> None:
    """A rewrite that fails after it has changed the graph."""
    for node in report.visiting("swiglu", list(graph.nodes)):
        if node.op == "call_function" and node.target is F.silu:
            node.target = F.relu
            raise IndexError("list index out of range")


def test_a_rewrite_that_fails_leaves_the_graph_as_it_came(monkeypatch):
    before = str(graph_of(model, *inputs()).graph)
    monkeypatch.setitem(passes.REWRITES, "swiglu", spoilt)
    torch._dynamo.reset()
    inner = Inner()
    options = {"inner_backend": inner, "strict": False}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.warns(UserWarning, match="swiglu.*backends.py:.*IndexError.*report") as told:
        result = compiled(*inputs())
    assert len([one for one in told if "liger_ops" in str(one.message)]) == 1
    torch.testing.assert_close(result, model(*inputs()))
    assert str(inner.graphs[0].graph) == before and inner.ops() == []


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_the_graph_that_is_left_compiles(monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """AOTAutograd asks of Dynamo's graph what a copy of it lacks."""
    monkeypatch.setitem(passes.REWRITES, "swiglu", spoilt)
    torch._dynamo.reset()
    options = {"inner_backend": inner, "strict": False}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.warns(UserWarning, match="swiglu"):
        torch.testing.assert_close(compiled(*inputs()), model(*inputs()))


def test_a_rewrite_that_fails_in_a_block_leaves_every_graph(monkeypatch):
    monkeypatch.setitem(passes.REWRITES, "swiglu", spoilt)
    module = graph_of(
        lambda x, w: model(checkpoint(model, x, w, use_reentrant=False), w), *inputs()
    )
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    before = [str(part.graph) for part in parts]
    with pytest.warns(UserWarning, match="swiglu"):
        report = passes.rewrite(module, strict=False)
    assert [str(part.graph) for part in parts] == before
    (finding,) = report.findings
    assert finding.op == "swiglu" and "IndexError" in str(finding.reason)


@pytest.mark.parametrize("how", ["option", "environment"])
def test_strict(monkeypatch, how):
    monkeypatch.setitem(passes.REWRITES, "swiglu", spoilt)
    monkeypatch.setenv("LIGER_OPS_STRICT", "1" if how == "environment" else "0")
    options = {"inner_backend": Inner(), **({"strict": True} if how == "option" else {})}
    with pytest.raises(Exception, match="list index out of range"):
        torch.compile(model, backend=liger_ops.backend, options=options)(*inputs())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rewrites": 5}, r"options\['rewrites'\] must be .* got int"),
        ({"inner_backend": None}, r"options\['inner_backend'\] must be .* got NoneType"),
        ({"strict": "yes"}, r"options\['strict'\] must be a bool or None, got str"),
    ],
)
def test_options_of_another_type(options, text):
    with pytest.raises(Exception, match=f"TypeError: backend liger: {text}"):
        torch.compile(model, backend=liger_ops.backend, options=options)(*inputs())


def test_dynamo_can_be_reset_after_a_refused_option() -> None:
    """The backend's own reset adds no backend to those that Dynamo resets, as an import would."""
    code = """
import torch, liger_ops
eager = {"inner_backend": lambda module, inputs: module.forward}
without_reset = lambda *graph: liger_ops.backend(*graph, options=eager)
torch.compile(lambda x: x * 2, backend=without_reset)(torch.ones(2))
torch.compiler.reset()
try:
    wrong = {"strict": "yes"}
    torch.compile(lambda x: x * 3, backend=liger_ops.backend, options=wrong)(torch.ones(2))
except torch._dynamo.exc.BackendCompilerFailed:
    torch.compiler.reset()
    print("reset")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "reset\n", run.stderr


def rotated_and(then: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (phi3(x.transpose(1, 2), cos, sin) for x in (q, k))
        return then(q), k.sum()

    return function


def test_another_layout_that_nothing_notices():
    """The op keeps the strides of x and torch.cat does not; attention accepts both."""
    found = check(applied(phi3), *heads(), *tables(16), counts={"rope": 1})
    (op,) = (node for node in found.nodes() if "rope" in str(node.target))
    assert op.meta["example_value"][0].stride() != torch.empty(2, 6, 5, 16).stride()


def written_copy(q: Tensor) -> Tensor:
    """A write through `contiguous`, which copies only if the tensor is transposed."""
    q.contiguous().mul_(2)
    return q * 1


def written_view(q: Tensor) -> Tensor:
    q.reshape(q.shape[0], -1).mul_(2)
    return q * 1


def strided(q: Tensor) -> Tensor:
    """As it lies in memory."""
    return torch.as_strided(q, (2, 3), (7, 1)) * 1


@pytest.mark.parametrize(
    "then",
    [written_copy, written_view, strided, lambda q: q, lambda q: q.view(2, -1), torch.sin],
    ids=["written copy", "written view", "strided", "returned", "viewed", "computed"],
)
def test_another_layout_that_is_noticed(then):
    """The queries are returned; of the keys only the sum is."""
    function = rotated_and(then)
    refused(function, *heads(), *tables(16), op="rope", reason="strides", counts={"rope": 1})


def test_a_user_kernel_between_is_a_write():
    """An unknown function may do anything."""

    @torch._dynamo.allow_in_graph
    def unknown(x: Tensor) -> Tensor:
        return x.add_(1)

    unknown.__module__ = "somebody"

    def function(x: Tensor) -> Tensor:
        gate, up = x * 1, x * 2
        z = F.silu(gate)
        return unknown(up) + z * up

    check(function, values(3, 8), counts={})


# In-place writes that no keyword and no name ending with an underscore shows.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    **{
        function.__name__: lambda x, function=function, options=options: function(x, *options, True)
        for function, *options in (
            (F.hardswish,), (F.hardsigmoid,), (F.celu, 1.0), (F.selu,), (F.mish,),
        )
    },
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, False, True),
    "dunder": lambda x: x.__imul__(2.0),
    "max_norm": lambda x: F.embedding(torch.tensor([0, 1]), x, None, 0.1),
    "running statistics": lambda x: F.batch_norm(x * 2.0 + 1.0, x[0], x[1].exp(), training=True),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_head_and_loss(name):
    """The logits of the loss are what the write made of them."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = x @ weight.T * 3.0
        with torch.set_grad_enabled(name not in ("max_norm", "running statistics")):
            WRITES[name](logits)
        return F.cross_entropy(logits, target)

    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(function, backend=liger_ops.backend, options=options)
    results = []
    for one in (function, compiled):
        x, weight = values(6, 8), values(16, 8, seed=1)
        loss = one(x, weight, torch.arange(6))
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    torch.testing.assert_close(results[1], results[0])


def test_a_mask_that_is_written_by_its_dunder_name():
    def function(q: Tensor, window: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        mask.__iand__(window)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(function, backend=liger_ops.backend, options=options)
    given = values(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(-1)
    torch.testing.assert_close(compiled(*given), function(*given))


def test_dtensors_are_left_alone(mesh):
    def function(x: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.rms_norm(x, (8,), eps=1e-6)) * up

    x, up = values(4, 8), values(4, 8, seed=1)
    found = Rewriter()
    compiled = torch.compile(function, backend=found)
    y = compiled(*(distribute_tensor(one, mesh, [Shard(0)]) for one in (x, up)))
    torch.testing.assert_close(y.full_tensor(), function(x, up))
    assert found.counts() == {}


def test_transforms_of_functions_are_left_alone():
    def function(x: Tensor, up: Tensor) -> Any:
        one = lambda row, other: F.silu(row) * other
        return torch.vmap(one)(x, up), torch.func.grad(lambda x: one(x, up).sum())(x)

    check(function, values(3, 8), values(3, 8, seed=1), counts={})
