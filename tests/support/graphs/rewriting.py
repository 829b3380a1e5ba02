"""Trace a function with torch.compile, rewrite it, and compare with the original."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from liger_ops.rewrites import rewrite
from liger_ops.rewrites.engine.report import Finding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

NARROW = (torch.bfloat16, torch.float16)
# The rounding errors of a few operations in another order, in units of float32's epsilon.
FLOAT32_ROUNDINGS = 16

Function = Callable[..., Any]


class Rewriter:
    """A backend that rewrites the graphs that it gets, keeps them and runs them eagerly."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.names = names
        self.graphs: list[fx.GraphModule] = []
        self.findings: list[Finding] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        self.findings += rewrite(module, self.names).findings
        self.graphs.append(module)
        return module.forward

    def counts(self) -> dict[str, int]:
        return dict(Counter(finding.op for finding in self.findings if finding.used))

    def reasons(self, op: str) -> list[str]:
        """List the reasons for which calls of an op were refused."""
        return [f.reason for f in self.findings if f.op == op and f.reason is not None]

    def nodes(self) -> list[fx.Node]:
        """List the nodes of every graph, including subgraphs."""
        return [
            node
            for graph in self.graphs
            for part in graph.modules()
            if isinstance(part, fx.GraphModule)
            for node in part.graph.nodes
        ]

    def calls(self, op: str) -> list[dict[str, Any]]:
        """List the arguments of each call of an op, by name and including defaults."""
        overload = getattr(torch.ops.liger, op).default
        calls = []
        for node in self.nodes():
            if node.target is overload:
                arguments = overload._schema.arguments
                positional = dict(zip((a.name for a in arguments), node.args, strict=False))
                defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
                calls.append({**defaults, **positional, **node.kwargs})
        return calls


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a leaf tensor of normally distributed values that requires gradients."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def check(
    function: Function,
    *inputs: Any,
    counts: dict[str, int],
    then: Sequence[Any] | None = None,
    names: Collection[str] | None = None,
    dynamic: bool | None = None,
) -> Rewriter:
    """Rewrite `function`, and compare its values and gradients with the original's.

    The error of each against the same function in a wider dtype may be at most twice the
    original's, plus the rounding of the result. `then` holds the inputs of a second call, which
    must not compile again.
    """
    torch._dynamo.reset()
    rewriter = Rewriter(names)
    compiled = torch.compile(function, backend=rewriter, fullgraph=True, dynamic=dynamic)
    for arguments in (inputs, then):
        if arguments is not None:
            assert_same(compiled, function, arguments)
    assert rewriter.counts() == counts, rewriter.findings
    assert len(rewriter.graphs) == 1
    return rewriter


def refused(
    function: Function,
    *inputs: Any,
    op: str,
    reason: str = "",
    counts: dict[str, int] | None = None,
) -> Rewriter:
    """Check a function in which `op` is not used.

    The only reported reason must contain `reason`; if that is empty, none may be reported.
    """
    rewriter = check(function, *inputs, counts=counts or {})
    reasons = rewriter.reasons(op)
    if reason:
        assert len(reasons) == 1 and reason in reasons[0], reasons
    else:
        assert reasons == []
    return rewriter


def assert_same(compiled: Function, function: Function, inputs: Sequence[Any]) -> None:
    widest = torch.float32 if _is_narrow(function, inputs) else torch.float64
    wide = copy.deepcopy(function).to(widest) if isinstance(function, nn.Module) else function
    truth = _results(wide, wide, _copied(inputs, widest))
    own = _results(function, function, _copied(inputs))
    rewritten = _results(compiled, function, _copied(inputs))
    assert len(truth) == len(own) == len(rewritten)
    for i, (exact, before, after) in enumerate(zip(truth, own, rewritten, strict=True)):
        if not isinstance(before, Tensor):
            assert (before is None and after is None) or before == after, i
            continue
        assert after.dtype == before.dtype and after.shape == before.shape, i
        if before.numel() == 0:
            continue
        if before.is_complex():
            exact, before, after = (torch.view_as_real(x) for x in (exact, before, after))
        exact, own_error = exact.to(widest), (before.to(widest) - exact.to(widest)).abs()
        largest = exact.nan_to_num().abs().max()
        eps = torch.finfo(after.dtype).eps if after.dtype in NARROW else 0.0
        eps += FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps
        # A gradient that is zero up to rounding, such as that of a key's bias, has no size.
        none = torch.finfo(torch.float32).eps ** 2
        allowed = 2 * own_error.nan_to_num().max() + eps * largest + none
        assert torch.equal(after.isnan(), before.isnan()), f"result {i}: NaN is elsewhere"
        error = (after.to(widest) - exact).abs().nan_to_num().max()
        assert error <= allowed, f"result {i}: error {error}, allowed {allowed}"


def _is_narrow(function: Function, inputs: Sequence[Any]) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if isinstance(function, nn.Module):
        tensors += function.parameters()
    return any(tensor.dtype in NARROW for tensor in tensors)


def _copied(inputs: Sequence[Any], widest: torch.dtype | None = None) -> list[Any]:
    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = widest if widest is not None and value.is_floating_point() else value.dtype
        # Keep the strides, unlike a clone of a view.
        duplicate = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
        duplicate.copy_(value.detach())
        return duplicate.requires_grad_(value.requires_grad)

    return pytree.tree_map(copied, list(inputs))


def _results(run: Function, function: Function, inputs: list[Any]) -> list[Any]:
    """Return the outputs of a call with their strides, the gradients of all inputs, and the inputs
    without gradients after the call."""
    outputs = [
        one.detach().clone() if isinstance(one, Tensor) and not one.requires_grad else one
        for one in pytree.tree_leaves(run(*inputs))
    ]
    leaves = [one for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)]
    wanted = [one for one in leaves if one.requires_grad]
    if isinstance(function, nn.Module):
        wanted += function.parameters()
    loss = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            grad = torch.randn(output.shape, generator=generator)
            # Rounded to bfloat16, the gradient is the same number in every dtype.
            loss = loss + (output * grad.to(torch.bfloat16).to(output.dtype)).sum()
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    # Outputs must keep their strides; those of gradients do not matter.
    strides = [one.stride() for one in outputs if isinstance(one, Tensor)]
    outputs = [one.detach() if isinstance(one, Tensor) else one for one in outputs] + strides
    left = [one.detach() for one in leaves if not one.requires_grad]
    return [*outputs, *gradients, *left]
