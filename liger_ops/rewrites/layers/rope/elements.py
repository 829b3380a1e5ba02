"""The elements of one position of values: what they are linear in, and how they are computed.

A value of shape (*positions, *elements) is read without its positions, which each operation keeps.
How many of its last dimensions are elements follows from the value that is computed from it: x has
one, and x.view(*positions, 2, -1), of which a code takes the halves, has two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...engine.canonical import IDENTITY, Call, calls, canonical, is_tensor, same, value

# Operations that are followed from one result, many more than a rotation has.
MOST = 100


class Step(NamedTuple):
    """The last operation of a value: its operands, how many dimensions of elements each has, and
    the function of their elements, tensors with one more dimension first."""

    operands: Sequence[tuple[Any, int]]
    compute: Callable[..., Tensor]


class Elements:
    """The elements of `root`, of shape (*positions, D), as functions of the nodes before it."""

    def __init__(self, root: fx.Node) -> None:
        self.root = root
        # Sizes that are symbols, of which the numbers are used that they have now.
        self.symbols: list[torch.SymInt] = []
        self._linear: dict[tuple[fx.Node, int], tuple[fx.Node, ...]] = {}

    def linear_in(self, node: Any, inner: int = 1) -> tuple[fx.Node, ...]:
        """The tensors of the root's shape that a value is linear in, from the nearest."""
        key = (node, inner)
        if not isinstance(node, fx.Node) or not is_tensor(node):
            return ()
        if key not in self._linear:
            self._linear[key] = ()
            self._linear[key] = tuple(self._linear_in(node, inner))
        return self._linear[key]

    def _linear_in(self, node: fx.Node, inner: int) -> list[fx.Node]:
        known, shape = value(node), tuple(value(self.root).shape)
        is_like = inner == 1 and known.is_floating_point() and same(tuple(known.shape), shape)
        is_like = is_like and calls(node, IDENTITY) is None
        step = self.step(node, inner) if len(self._linear) < MOST else None
        of = [self.linear_in(*one) for one in step.operands] if step else []
        # A product is linear in what one factor is made of, and everything else in what all are.
        wanted = 1 if calls(node, "mul") else len(of)
        found = dict.fromkeys(x for one in of for x in one)
        return [node] * is_like + [x for x in found if sum(x in one for one in of) == wanted]

    def step(self, node: fx.Node, inner: int) -> Step | None:
        """None for an operation that is not linear, or changes the positions."""
        call, sizes = canonical(node), self.sizes(node, inner)
        step = None if call is None or sizes is None else self._step(node, call, inner, sizes)
        tensors = [one for one in step.operands if is_tensor(one[0])] if step else []
        return None if any(self.sizes(*one) is None for one in tensors) else step

    def _step(self, node: fx.Node, call: Call, inner: int, sizes: list[int]) -> Step | None:
        operand = call.args[0]
        if isinstance(operand, fx.Node) and is_tensor(operand):
            moved = self._moved(node, call, inner, sizes)
            if moved is not None:
                of, compute = moved
                return Step([(operand, of)], compute)
        match call.op, call.args:
            case (("add" | "sub" | "mul" | "neg"), operands):
                return Step([(one, inner) for one in operands], getattr(operator, call.op))
            case "cat", (pieces, int(dim)) if dim >= -inner:
                return Step([(one, inner) for one in pieces], lambda *x: torch.cat(x, dim))
            case "stack", (pieces, int(dim)) if dim >= -inner:
                return Step([(one, inner - 1) for one in pieces], lambda *x: torch.stack(x, dim))
        return None

    def _moved(
        self, node: fx.Node, call: Call, inner: int, sizes: list[int]
    ) -> tuple[int, Callable[[Tensor], Tensor]] | None:
        """How an operation moves the elements of one tensor: how many dimensions these have there,
        and the function."""
        of = value(call.args[0])
        match call.op, call.args[1:]:
            case (("cast" | "contiguous" | "identity"), _) if _kind(value(node)) == _kind(of):
                return inner, lambda x: x
            case (("view" | "flatten"), _):
                rows = value(node).dim() - inner
                if same(tuple(value(node).shape[:rows]), tuple(of.shape[:rows])):
                    return of.dim() - rows, lambda x: x.reshape(len(x), *sizes)
            case "expand", _ if of.dim() == value(node).dim():
                return inner, lambda x: x.expand(len(x), *sizes)
            case "slice", (int(dim), *bounds) if dim >= -inner:
                numbers = [self.number(one) for one in bounds]
                if None not in numbers:
                    part = slice(*numbers)
                    return inner, lambda x: x.transpose(dim, -1)[..., part].transpose(dim, -1)
            case "getitem", (parts,):
                return _taken(parts, inner)
            case "unsqueeze", (int(dim),) if dim >= -inner:
                return inner - 1, lambda x: x.unsqueeze(dim)
            case "squeeze", (int(dim),) if dim >= -inner - 1 and value(node).dim() < of.dim():
                return inner + 1, lambda x: x.squeeze(dim)
            case "transpose", ((int(a), int(b)),) if min(a, b) >= -inner:
                return inner, lambda x: x.transpose(a, b)
            case "repeat_interleave", (int(count), int(dim)) if dim >= -inner:
                return inner, lambda x: x.repeat_interleave(count, dim)
            case "sum", ((int(dim),), False, None) if dim >= -inner - 1:
                return inner + 1, lambda x: x.sum(dim)
            case "view_as_complex", _:
                return inner + 1, lambda x: torch.view_as_complex(x.contiguous())
            case "view_as_real", _:
                return inner - 1, torch.view_as_real
        return None

    def sizes(self, node: fx.Node, inner: int) -> list[int] | None:
        """The sizes of the dimensions of elements; None if one is not known."""
        sizes = [self.number(one) for one in value(node).shape[-inner:]] if inner else []
        known = [one for one in sizes if one is not None]
        return known if len(known) == len(sizes) else None

    def number(self, size: Any) -> int | None:
        size = value(size)
        if isinstance(size, torch.SymInt):
            self.symbols.append(size)
            size = size.node.hint
        return size if isinstance(size, int) else None


def _kind(x: Tensor) -> tuple[bool, bool]:
    return x.is_floating_point(), x.is_complex()


def _taken(parts: Sequence[Any], inner: int) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """An index of the last dimensions, which leaves `inner` of them."""
    left, count = list(parts), 0
    while left and (count < inner or isinstance(left[-1], int)):
        count += not isinstance(left.pop(), int)
    if any(one != slice(None) for one in left) or count < inner:
        return None
    taken = (..., *parts[len(left) :])
    if not all(isinstance(one, int) or one == slice(None) for one in taken[1:]):
        return None
    return len(taken) - 1, lambda x: x[taken]
