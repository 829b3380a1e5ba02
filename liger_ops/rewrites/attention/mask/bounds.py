"""Bounds of the numbers that a mask may hold, from the code that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...engine.canonical import arguments, operation, value
from ...engine.maps.index_maps import CASTS, VIEWS, view_of
from ..numbers import constant

Bounds = tuple[float, float]
# Parameters, activations, integers and what is computed from them are taken to be in these bounds.
# A row whose scores are all hidden by -1e4 still has the softmax of its scores, up to the rounding
# of their sum, in the code and in kernels.
ORDINARY: Bounds = (-1e4, 1e4)
UNKNOWN: Bounds = (-math.inf, math.inf)
# As in `evaluate`, the limit keeps the recursion out of a model's residual stream.
DEPTH = 60
# Functions that make large numbers or infinities of ordinary ones.
_UNBOUNDED = {
    *("log", "log2", "log10", "log1p", "logit", "div", "truediv", "divide", "true_divide"),
    *("reciprocal", "rsqrt", "exp", "exp2", "expm1", "tan", "empty", "empty_like", "new_empty"),
    # The bytes as those of another dtype.
    "view",
}


@dataclass
class MaskBounds:
    """Bounds of a graph's nodes.

    Attributes:
        outer: for a checkpointed block, its inputs, each with the operand of the block's call.
        read: the float tensors that bounds were derived from; the bounds hold while none of these
            is written in place.
    """

    outer: Mapping[fx.Node, Any] = field(default_factory=dict)
    read: set[fx.Node] = field(default_factory=set)
    _depth: int = 0

    def of(self, argument: Any) -> Bounds:
        """Return the bounds of a number or of a tensor's elements."""
        example = value(argument)
        if isinstance(example, (bool, int, float)):
            return UNKNOWN if math.isnan(example) else (float(example), float(example))
        if not isinstance(example, Tensor) or not isinstance(argument, fx.Node):
            if isinstance(example, torch.SymFloat):
                # Adds the guard that it has this value.
                number = constant(argument)
                return UNKNOWN if number is None else self.of(number)
            return ORDINARY if isinstance(example, torch.SymInt) else UNKNOWN
        if example.dtype == torch.bool:
            return (0.0, 1.0)
        read_before = set(self.read)
        self.read.add(argument)
        self._depth += 1
        result = self._derived(argument, example) if self._depth <= DEPTH else UNKNOWN
        self._depth -= 1
        if example.is_floating_point():
            return rounded_to(result, example.dtype)
        # Integers are taken to be ordinary, whatever is written, unless the code says otherwise.
        self.read = read_before
        return result if all(map(math.isfinite, result)) else ORDINARY

    def _derived(self, node: fx.Node, example: Tensor) -> Bounds:
        if node.op in ("placeholder", "get_attr"):
            if node in self.outer:
                return self.of(self.outer[node])
            is_learned = example.requires_grad or isinstance(example, torch.nn.Parameter)
            return ORDINARY if is_learned else UNKNOWN
        if (view := view_of(node, VIEWS | CASTS)) is not None:
            return self.of(view.args[0])
        name = operation(node)
        rule = _RULES.get(name)
        if rule is not None:
            try:
                return rule(self, *arguments(node), **node.kwargs)
            except TypeError:
                return UNKNOWN
        inputs = [operand for operand in node.all_input_nodes if isinstance(value(operand), Tensor)]
        if name is None or name in _UNBOUNDED or not inputs:
            return UNKNOWN
        return (
            ORDINARY if all(inside(self.of(operand), ORDINARY) for operand in inputs) else UNKNOWN
        )


def rounded_to(bounds: Bounds, dtype: torch.dtype) -> Bounds:
    """Return the bounds after rounding to `dtype`, where a number too large is infinite or NaN."""
    most = torch.finfo(dtype).max
    low, high = bounds
    return (low if low >= -most else -math.inf, high if high <= most else math.inf)


def inside(bounds: Bounds, outer: Bounds) -> bool:
    return outer[0] <= bounds[0] and bounds[1] <= outer[1]


def _union(*bounds: Bounds) -> Bounds:
    return (min(low for low, _ in bounds), max(high for _, high in bounds))


def _product(bounds: MaskBounds, x: Any, y: Any) -> Bounds:
    a, b = bounds.of(x), bounds.of(y)
    tensors = [operand for operand in (value(x), value(y)) if isinstance(operand, Tensor)]
    are_integers = not any(operand.is_floating_point() for operand in tensors)
    # A product of two ordinary tensors is taken to be ordinary; only a number may make it large.
    if len(tensors) == 2 or (are_integers and inside(_union(a, b), ORDINARY)):
        return ORDINARY if inside(_union(a, b), ORDINARY) else UNKNOWN
    if not all(map(math.isfinite, (*a, *b))):
        return UNKNOWN
    ends = [x * y for x in a for y in b]
    return (min(ends), max(ends))


def _sum(a: Bounds, b: Bounds) -> Bounds:
    # Likewise a sum of ordinary numbers, so that a chain of sums does not leave the bounds.
    if inside(a, ORDINARY) and inside(b, ORDINARY):
        return (max(a[0] + b[0], ORDINARY[0]), min(a[1] + b[1], ORDINARY[1]))
    return (a[0] + b[0], a[1] + b[1])


def _negated(a: Bounds) -> Bounds:
    return (-a[1], -a[0])


def _where(bounds: MaskBounds, first: Any, second: Any, third: Any) -> Bounds:
    """Return the bounds of torch.where(condition, a, b), or of a.where(condition, b)."""
    if isinstance(value(first), Tensor) and value(first).dtype == torch.bool:
        return _union(bounds.of(second), bounds.of(third))
    return _union(bounds.of(first), bounds.of(third))


_RULES: dict[str | None, Callable[..., Bounds]] = {
    "where": _where,
    "masked_fill": lambda bounds, x, mask, value: _union(bounds.of(x), bounds.of(value)),
    "add": lambda bounds, x, y: _sum(bounds.of(x), bounds.of(y)),
    "sub": lambda bounds, x, y: _sum(bounds.of(x), _negated(bounds.of(y))),
    "rsub": lambda bounds, x, y: _sum(bounds.of(y), _negated(bounds.of(x))),
    "mul": _product,
    "neg": lambda bounds, x: _negated(bounds.of(x)),
    "full": lambda bounds, size, fill_value, **options: bounds.of(fill_value),
    "new_full": lambda bounds, x, size, fill_value, **options: bounds.of(fill_value),
    "full_like": lambda bounds, x, fill_value, **options: bounds.of(fill_value),
    **dict.fromkeys(("tensor", "scalar_tensor"), lambda bounds, data, **options: bounds.of(data)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda bounds, *_, **options: (0.0, 0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda bounds, *_, **options: (1.0, 1.0)),
    "getitem": lambda bounds, x, index: bounds.of(x),
    "arange": lambda bounds, *ends, **options: ORDINARY,
    **dict.fromkeys(
        ("triu", "tril"), lambda bounds, x, diagonal=0: _union(bounds.of(x), (0.0, 0.0))
    ),
    **dict.fromkeys(
        ("cat", "stack"), lambda bounds, tensors, dim=0: _union(*map(bounds.of, tensors))
    ),
}
