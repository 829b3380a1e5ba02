"""The elements of one position: which tensors they are linear in, and how they are computed.

A value has the shape (*positions, *elements). Only its elements are read here, because every
operation of a rotation keeps the positions apart. How many of a value's last dimensions are
elements follows from the value that is computed from it: x has one such dimension, and
x.view(*positions, 2, -1), from which code takes the halves, has two. This number is called `inner`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...engine.canonical import IDENTITY, Call, calls, canonical, is_tensor, same, value

# Most operations that are followed from one result: many more than a rotation has.
MOST = 100


class ElementStep(NamedTuple):
    """The operation that computes a value.

    Attributes:
        operands: the operands, each with its number of dimensions of elements.
        compute: the function from the elements of the operands to the elements of the value. Each
            of these tensors has one more dimension, which comes first.
    """

    operands: Sequence[tuple[Any, int]]
    compute: Callable[..., Tensor]


class Elements:
    """The elements of `root`, of shape (*positions, D), as functions of the nodes before it."""

    def __init__(self, root: fx.Node) -> None:
        self.root = root
        # Symbolic sizes whose current numbers were used. A rotation that is read with them is valid
        # for these numbers alone.
        self.symbols: list[torch.SymInt] = []
        self._linear: dict[tuple[fx.Node, int], tuple[fx.Node, ...]] = {}

    def linear_in(self, node: Any, inner: int = 1) -> tuple[fx.Node, ...]:
        """Return the tensors of the root's shape that a value is linear in, from the nearest."""
        key = (node, inner)
        if not isinstance(node, fx.Node) or not is_tensor(node):
            return ()
        if key not in self._linear:
            # Counts the operation for MOST before its operands are followed.
            self._linear[key] = ()
            self._linear[key] = tuple(self._linear_in(node, inner))
        return self._linear[key]

    def _linear_in(self, node: fx.Node, inner: int) -> list[fx.Node]:
        known, shape = value(node), tuple(value(self.root).shape)
        is_like = inner == 1 and known.is_floating_point() and same(tuple(known.shape), shape)
        is_like = is_like and calls(node, IDENTITY) is None
        step = self.step(node, inner) if len(self._linear) < MOST else None
        xs_of = [self.linear_in(*operand) for operand in step.operands] if step else []
        # A product is linear in x if exactly one factor is, and any other operation if all its
        # operands are.
        wanted = 1 if calls(node, "mul") else len(xs_of)
        tensors = dict.fromkeys(x for xs in xs_of for x in xs)
        return [node] * is_like + [x for x in tensors if sum(x in xs for xs in xs_of) == wanted]

    def step(self, node: fx.Node, inner: int) -> ElementStep | None:
        """Return the operation of a node; None if it is not linear, or changes the positions."""
        call, sizes = canonical(node), self.sizes(node, inner)
        step = None if call is None or sizes is None else self._step(node, call, inner, sizes)
        tensors = [operand for operand in step.operands if is_tensor(operand[0])] if step else []
        return None if any(self.sizes(*operand) is None for operand in tensors) else step

    def _step(self, node: fx.Node, call: Call, inner: int, sizes: list[int]) -> ElementStep | None:
        operand = call.args[0]
        if isinstance(operand, fx.Node) and is_tensor(operand):
            moved = self._moved(node, call, inner, sizes)
            if moved is not None:
                operand_inner, compute = moved
                return ElementStep([(operand, operand_inner)], compute)
        match call.op, call.args:
            case (("add" | "sub" | "mul" | "neg"), operands):
                return ElementStep([(x, inner) for x in operands], getattr(operator, call.op))
            case "cat", (pieces, int(dim)) if dim >= -inner:
                return ElementStep([(x, inner) for x in pieces], lambda *x: torch.cat(x, dim))
            case "stack", (pieces, int(dim)) if dim >= -inner:
                return ElementStep([(x, inner - 1) for x in pieces], lambda *x: torch.stack(x, dim))
        return None

    def _moved(
        self, node: fx.Node, call: Call, inner: int, sizes: list[int]
    ) -> tuple[int, Callable[[Tensor], Tensor]] | None:
        """Read an operation that moves or sums the elements of one tensor.

        Returns how many dimensions of elements that tensor has, and the function of the elements.
        """
        source = value(call.args[0])
        match call.op, call.args[1:]:
            case (("cast" | "contiguous" | "identity"), _) if _kind(value(node)) == _kind(source):
                return inner, lambda x: x
            case "view", _:
                rows = value(node).dim() - inner
                if same(tuple(value(node).shape[:rows]), tuple(source.shape[:rows])):
                    return source.dim() - rows, lambda x: x.reshape(len(x), *sizes)
            case "expand", _ if source.dim() == value(node).dim():
                return inner, lambda x: x.expand(len(x), *sizes)
            case "slice", (int(dim), *bounds) if dim >= -inner:
                numbers = [self.number(bound) for bound in bounds]
                if None not in numbers:
                    index = slice(*numbers)
                    return inner, lambda x: x.transpose(dim, -1)[..., index].transpose(dim, -1)
            case "getitem", (indices,):
                return _indexed(indices, inner)
            case "unsqueeze", (int(dim),) if dim >= -inner:
                return inner - 1, lambda x: x.unsqueeze(dim)
            case "squeeze", (int(dim),) if dim >= -inner - 1 and value(node).dim() < source.dim():
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
        """Return the sizes of a value's dimensions of elements; None if one is not known."""
        sizes = [self.number(size) for size in value(node).shape[-inner:]] if inner else []
        known = [size for size in sizes if size is not None]
        return known if len(known) == len(sizes) else None

    def number(self, size: Any) -> int | None:
        """Return a size as a number: a symbolic size as the number that it has now."""
        size = value(size)
        if isinstance(size, torch.SymInt):
            self.symbols.append(size)
            size = size.node.hint
        return size if isinstance(size, int) else None


def _kind(x: Tensor) -> tuple[bool, bool]:
    return x.is_floating_point(), x.is_complex()


def _indexed(indices: Sequence[Any], inner: int) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """Read an index of the last dimensions whose result has `inner` dimensions of elements.

    Returns how many dimensions of elements the indexed tensor has, and the function.
    """
    left, count = list(indices), 0
    while left and (count < inner or isinstance(left[-1], int)):
        count += not isinstance(left.pop(), int)
    if any(index != slice(None) for index in left) or count < inner:
        return None
    taken = (..., *indices[len(left) :])
    if not all(isinstance(index, int) or index == slice(None) for index in taken[1:]):
        return None
    return len(taken) - 1, lambda x: x[taken]
