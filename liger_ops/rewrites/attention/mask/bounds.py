"""The lowest and the highest number that a mask may hold, from the code that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...engine.canonical import arguments, operation, value
from ..numbers import constant

Bounds = tuple[float, float]
# Parameters, activations, integers and what is computed from them are taken to be in these bounds.
# A row whose scores are all hidden by -1e4 still has the softmax of its scores, up to the rounding
# of their sum, in the code and in kernels.
ORDINARY: Bounds = (-1e4, 1e4)
UNKNOWN: Bounds = (-math.inf, math.inf)
DEPTH = 60
_KEPT = {
    *("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "expand", "expand_as"),
    *("broadcast_to", "transpose", "swapaxes", "permute", "t", "T", "mT", "contiguous", "clone"),
    *("detach", "to", "type", "type_as", "float", "double", "half", "bfloat16", "getitem"),
    *("int", "long", "short", "char", "byte"),
    *("repeat", "tile"),
}
# Functions that make large numbers or infinities of ordinary ones.
_UNBOUNDED = {
    *("log", "log2", "log10", "log1p", "logit", "div", "truediv", "divide", "true_divide"),
    *("reciprocal", "rsqrt", "exp", "exp2", "expm1", "tan", "empty", "empty_like", "new_empty"),
}


@dataclass
class MaskBounds:
    """Bounds of a graph's nodes. `outer` maps a checkpointed block's inputs to what it is given.

    `read` collects the float tensors that the bounds were derived from: they hold if none of those
    is written in place.
    """

    outer: Mapping[fx.Node, Any] = field(default_factory=dict)
    read: set[fx.Node] = field(default_factory=set)
    _depth: int = 0

    def of(self, argument: Any) -> Bounds:
        known = value(argument)
        if isinstance(known, (bool, int, float)):
            return UNKNOWN if math.isnan(known) else (float(known), float(known))
        if not isinstance(known, Tensor) or not isinstance(argument, fx.Node):
            if isinstance(known, torch.SymFloat):
                # Adds the guard that it has this value.
                number = constant(argument)
                return UNKNOWN if number is None else self.of(number)
            return ORDINARY if isinstance(known, torch.SymInt) else UNKNOWN
        if known.dtype == torch.bool:
            return (0.0, 1.0)
        before = set(self.read)
        self.read.add(argument)
        self._depth += 1
        found = self._of_numbers(argument, known) if self._depth <= DEPTH else UNKNOWN
        self._depth -= 1
        if known.is_floating_point():
            return held(found, known.dtype)
        # Integers are taken to be ordinary, whatever is written, unless the code says otherwise.
        self.read = before
        return found if all(map(math.isfinite, found)) else ORDINARY

    def _of_numbers(self, node: fx.Node, known: Tensor) -> Bounds:
        if node.op in ("placeholder", "get_attr"):
            if node in self.outer:
                return self.of(self.outer[node])
            is_learned = known.requires_grad or isinstance(known, torch.nn.Parameter)
            return ORDINARY if is_learned else UNKNOWN
        name = operation(node)
        if name in _KEPT and node.args:
            return self._of_same(node, node.args[0])
        rule = _RULES.get(name)
        if rule is not None:
            try:
                return rule(self, *arguments(node), **node.kwargs)
            except TypeError:
                return UNKNOWN
        inputs = [one for one in node.all_input_nodes if isinstance(value(one), Tensor)]
        if name is None or name in _UNBOUNDED or not inputs:
            return UNKNOWN
        return ORDINARY if all(inside(self.of(one), ORDINARY) for one in inputs) else UNKNOWN

    def _of_same(self, node: fx.Node, x: Any) -> Bounds:
        """The bounds of the numbers of x, which `node` has too, unless it reads their bytes."""
        is_read_anew = operation(node) == "view" and value(x).dtype != value(node).dtype
        return UNKNOWN if is_read_anew else self.of(x)


def held(bounds: Bounds, dtype: torch.dtype) -> Bounds:
    """The bounds after rounding to `dtype`, in which a number too large is infinite or NaN."""
    most = torch.finfo(dtype).max
    low, high = bounds
    return (low if low >= -most else -math.inf, high if high <= most else math.inf)


def inside(bounds: Bounds, of: Bounds) -> bool:
    return of[0] <= bounds[0] and bounds[1] <= of[1]


def _union(*parts: Bounds) -> Bounds:
    return (min(low for low, _ in parts), max(high for _, high in parts))


def _product(of: MaskBounds, x: Any, y: Any) -> Bounds:
    a, b = of.of(x), of.of(y)
    tensors = [one for one in (value(x), value(y)) if isinstance(one, Tensor)]
    are_integers = not any(one.is_floating_point() for one in tensors)
    if len(tensors) == 2 or (are_integers and inside(_union(a, b), ORDINARY)):
        return ORDINARY if inside(_union(a, b), ORDINARY) else UNKNOWN
    if not all(map(math.isfinite, (*a, *b))):
        return UNKNOWN
    ends = [x * y for x in a for y in b]
    return (min(ends), max(ends))


def _sum(a: Bounds, b: Bounds) -> Bounds:
    if inside(a, ORDINARY) and inside(b, ORDINARY):
        return (max(a[0] + b[0], ORDINARY[0]), min(a[1] + b[1], ORDINARY[1]))
    return (a[0] + b[0], a[1] + b[1])


def _negated(a: Bounds) -> Bounds:
    return (-a[1], -a[0])


def _where(of: MaskBounds, first: Any, second: Any, third: Any) -> Bounds:
    """torch.where(condition, a, b), or a.where(condition, b): a condition has bounds 0 and 1."""
    if isinstance(value(first), Tensor) and value(first).dtype == torch.bool:
        return _union(of.of(second), of.of(third))
    return _union(of.of(first), of.of(third))


_RULES: dict[str | None, Callable[..., Bounds]] = {
    "where": _where,
    "masked_fill": lambda of, x, mask, value: _union(of.of(x), of.of(value)),
    "add": lambda of, x, y: _sum(of.of(x), of.of(y)),
    "sub": lambda of, x, y: _sum(of.of(x), _negated(of.of(y))),
    "rsub": lambda of, x, y: _sum(of.of(y), _negated(of.of(x))),
    "mul": _product,
    "neg": lambda of, x: _negated(of.of(x)),
    "full": lambda of, size, fill_value, **options: of.of(fill_value),
    "new_full": lambda of, x, size, fill_value, **options: of.of(fill_value),
    "full_like": lambda of, x, fill_value, **options: of.of(fill_value),
    **dict.fromkeys(("tensor", "scalar_tensor"), lambda of, data, **options: of.of(data)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda of, *_, **options: (0.0, 0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda of, *_, **options: (1.0, 1.0)),
    "arange": lambda of, *ends, **options: ORDINARY,
    **dict.fromkeys(("triu", "tril"), lambda of, x, diagonal=0: _union(of.of(x), (0.0, 0.0))),
    **dict.fromkeys(("cat", "stack"), lambda of, tensors, dim=0: _union(*map(of.of, tensors))),
}
