"""Functions with attention, compiled with and without the rewrites of their graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch._higher_order_ops.flex_attention import flex_attention

from liger_ops.rewrites.engine.report import Report

# The calls in a graph that are attention with a mask.
VARLEN = torch.ops.liger.varlen_attention.default
MASKED = (flex_attention, VARLEN)


def mask_nodes(call: fx.Node) -> Any:
    """Return the nodes of the documents, or of the block mask, that an attention call is given."""
    return call.args[3:7] if call.target is VARLEN else call.args[4][2:6]


Rewrite = Callable[[fx.Graph, Report], None]


def compiled(
    function: Callable[..., Any],
    rewrites: Sequence[Rewrite],
    dynamic: bool = False,
    inner: Callable[..., Any] = aot_eager,
) -> tuple[Callable[..., Any], Report, list[fx.GraphModule]]:
    """Compile the function with Dynamo, the rewrites and `inner`; return the rewritten graphs too.

    With dynamic shapes AOTAutograd may request another trace, with floats as constants: only the
    last trace is kept.
    """
    report = Report()
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        trace_report = Report()
        subgraphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
        for subgraph in subgraphs:
            for rewrite in rewrites:
                rewrite(subgraph.graph, trace_report)
            subgraph.graph.lint()
            subgraph.recompile()
        run = inner(module, inputs)
        graphs.extend(subgraphs)
        report.findings.extend(trace_report.findings)
        return run

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic), report, graphs


def attention_options(graphs: Sequence[fx.GraphModule]) -> list[dict[str, Any]]:
    """Return the keyword arguments of each attention call."""
    return [
        dict(node.kwargs)
        for graph in graphs
        for node in graph.graph.nodes
        if node.target is F.scaled_dot_product_attention
    ]


def as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile nothing: the fastest inner backend."""
    return module.forward


def results(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradients: bool = True
) -> list[Tensor]:
    """Return the output, and the gradient of each input that requires one."""
    if not gradients:
        with torch.no_grad():
            return [function(*inputs)]
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*inputs)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]


def checked(
    function: Callable[..., Tensor],
    rewrite: Rewrite,
    inputs: Sequence[Tensor],
    dynamic: bool,
    gradients: bool,
) -> tuple[Report, list[dict[str, Any]]]:
    """Compare the results with and without the rewrite; return its report, and the keyword
    arguments of the attention calls."""
    rewritten, report, graphs = compiled(function, [rewrite], dynamic, as_it_is)
    actual, expected = (results(f, inputs, gradients) for f in (rewritten, function))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    return report, attention_options(graphs)


def heads(batch: int, number: int, length: int, size: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, number, length, size, generator=generator)


def qkv(queries: int, keys: int | None = None, grouped: int = 1) -> list[Tensor]:
    keys = queries if keys is None else keys
    return [
        heads(2, 4, queries, seed=0),
        heads(2, 4 // grouped, keys, seed=1),
        heads(2, 4 // grouped, keys, seed=2),
    ]
