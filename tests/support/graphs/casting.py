"""Casts to a dtype and back at any edge of a function's graph, to compare the function with its
rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from liger_ops.fusion.trace import Trace
from liger_ops.rewrites import rewrite
from liger_ops.rewrites.engine.graph_state import needed_by

Function = Callable[..., Any]

# They give no tensor, or read one without computing.
_READ = {"__get__", "size", "dim", "numel", "__len__", "stride", "is_floating_point", "is_complex"}


class Casting(TorchFunctionMode):
    """Cast the tensor numbered `at`, of those that functions of torch are given, to a dtype and
    back. `count` is the number of these tensors, `without` the functions that are left out."""

    def __init__(
        self, at: int = -1, dtype: torch.dtype | None = None, without: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.at, self.dtype, self.count, self.without = at, dtype, 0, {*_READ, *without}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "type_as":
            args = self.cast(args[0]), args[1]
        elif name not in self.without:
            args, kwargs = pytree.tree_map(self.cast, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def cast(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        self.count += 1
        return x.to(self.dtype).to(x.dtype) if self.count == self.at + 1 else x


def cast_at(function: Function, at: int, dtype: torch.dtype) -> Function:
    """The function with the cast, and its results too may be cast."""

    def cast(*args: Any) -> Any:
        with Casting(at, dtype) as casting:
            return pytree.tree_map(casting.cast, function(*args))

    return cast


def edges(function: Function, inputs: Sequence[Any]) -> int:
    """The number of places for the cast."""
    with Casting() as casting:
        pytree.tree_map(casting.cast, function(*inputs))
    return casting.count


class Rewritten:
    """The rewritten graph of a function.

    Attributes:
        used: the ops that the rewrites found.
        lost: the dtypes of values that only the graph before needs.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], names: Collection[str]) -> None:
        trace = Trace()
        given = [
            trace.input(f"x{i}", tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x
            for i, x in enumerate(inputs)
        ]
        with trace.running():
            result = function(*given)
        self.module = trace.module(pytree.tree_leaves(result))
        before = self.dtypes()
        report = rewrite(self.module, names, strict=True)
        self.used = [one.op for one in report.findings if one.used]
        self.lost = before - self.dtypes()

    def dtypes(self) -> set[torch.dtype]:
        needed = needed_by(*self.module.graph.find_nodes(op="output"))
        values = (node.meta.get("example_value") for node in needed)
        return {x.dtype for x in values if isinstance(x, Tensor)}

    def __call__(self, *args: Any) -> Any:
        return fx.Interpreter(self.module).run(*(x for x in args if isinstance(x, Tensor)))


def results(run: Function, inputs: Sequence[Any]) -> list[Tensor]:
    """The results of a function and the gradients of its inputs."""
    copies = [
        x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    outputs = [y for y in pytree.tree_leaves(run(*copies)) if isinstance(y, Tensor)]
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for y in outputs:
        dy = torch.randn(y.shape, generator=generator)
        if y.requires_grad:
            loss = loss + (y * dy.to(y.dtype)).sum().float()
    leaves = [x for x in copies if isinstance(x, Tensor) and x.is_floating_point()]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(gradients, leaves, strict=True)
    none = [torch.zeros_like(x) if dx is None else dx for dx, x in pairs]
    return [y.detach() for y in (*outputs, *none)]


def distance(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest distance of two results, as a part of their size. One that is all but zero, such
    as the gradient through the norm of a constant, is measured by the others."""
    sizes = [one.double().nan_to_num().norm().item() for one in before]
    found = [0.0]
    for one, other, size in zip(before, after, sizes, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        a, b = one.double(), other.double()
        difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm().item()
        found.append(difference / max(size, max(sizes) / 100, 1e-9))
    return max(found)
