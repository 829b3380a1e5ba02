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

# Functions that return no tensor, or read one without computing.
_READ = {"__get__", "size", "dim", "numel", "__len__", "stride", "is_floating_point", "is_complex"}


class Casting(TorchFunctionMode):
    """Casts one of the tensors that torch's functions are given to a dtype and back.

    at: The number of this tensor, in the order of the calls; -1 casts none.
    without: The names of functions whose arguments are not counted.
    count: How many tensors have been counted.
    """

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
    """Return the function with the cast, which may also be of one of its results."""

    def cast(*args: Any) -> Any:
        with Casting(at, dtype) as casting:
            return pytree.tree_map(casting.cast, function(*args))

    return cast


def edges(function: Function, inputs: Sequence[Any]) -> int:
    """Return the number of tensors that could be cast."""
    with Casting() as casting:
        pytree.tree_map(casting.cast, function(*inputs))
    return casting.count


class Rewritten:
    """The rewritten graph of a function.

    Attributes:
        used: the ops that the rewrites inserted.
        lost: the dtypes of values that only the graph before needs.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], names: Collection[str]) -> None:
        trace = Trace()
        arguments = [
            trace.input(f"x{i}", tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x
            for i, x in enumerate(inputs)
        ]
        with trace.running():
            result = function(*arguments)
        self.module = trace.module(pytree.tree_leaves(result))
        before = self.dtypes()
        report = rewrite(self.module, names, strict=True)
        self.used = [finding.op for finding in report.findings if finding.used]
        self.lost = before - self.dtypes()

    def dtypes(self) -> set[torch.dtype]:
        needed = needed_by(*self.module.graph.find_nodes(op="output"))
        values = (node.meta.get("example_value") for node in needed)
        return {x.dtype for x in values if isinstance(x, Tensor)}

    def __call__(self, *args: Any) -> Any:
        return fx.Interpreter(self.module).run(*(x for x in args if isinstance(x, Tensor)))


def results(run: Function, inputs: Sequence[Any]) -> list[Tensor]:
    """Return the results of a function and the gradients of its inputs."""
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
    """Return the largest difference between two results, relative to their size.

    A result that is all but zero, such as the gradient through the norm of a constant, is measured
    relative to the largest result.
    """
    sizes = [result.double().nan_to_num().norm().item() for result in before]
    distances = [0.0]
    for result, other, size in zip(before, after, sizes, strict=True):
        assert result.dtype == other.dtype and result.shape == other.shape
        a, b = result.double(), other.double()
        difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm().item()
        distances.append(difference / max(size, max(sizes) / 100, 1e-9))
    return max(distances)
