"""The two matrix products of attention: queries with keys, and weights with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..engine.canonical import Call, calls, canonical, is_tensor, value
from ..engine.insertion import View, viewed


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph, and the views that give it attention's shape: (B, H, tokens, dim)."""

    source: fx.Node
    views: tuple[View, ...] = ()

    def viewed(self, *views: View) -> Operand:
        return replace(self, views=(*self.views, *views))

    def before(self, at: fx.Node) -> fx.Node:
        """Return the operand as a node, with its views inserted before `at`."""
        return viewed(at, self.source, self.views)


class Scores(NamedTuple):
    """The product query @ key^T, times `scale`, plus `bias`."""

    query: Operand
    key: Operand
    nodes: tuple[fx.Node, ...]
    scale: Any = 1.0
    bias: fx.Node | None = None


class Weighted(NamedTuple):
    """The product weights @ value; the views `back` give (..., S, D) the shape of the result."""

    weights: fx.Node
    value: Operand
    back: tuple[View, ...] = ()


def product_of_scores(node: Any) -> Scores | None:
    """Return the product of queries and keys that `node` computes, or None."""
    product = _matrix_product(node)
    if product is None:
        return None
    # By subscripts: the result is (batch..., i, j), the queries have i and d, the keys j and d.
    call, operands, (*terms, result) = product
    *batch, i, j = result
    by_role = sorted(zip(terms, operands, strict=True), key=lambda operand: j in operand[0])
    (query, queries), (key, keys) = by_role
    d = next(iter(set(query) - set(result)), "")
    if set(query) != {*batch, i, d} or set(key) != {*batch, j, d}:
        return None
    nodes: tuple[fx.Node, ...] = (node,)
    transposed = calls(keys, "transpose")
    if transposed is not None and transposed.args[1] == (-2, -1):
        nodes, keys, key = (node, keys), transposed.args[0], (*key[:-2], key[-1], key[-2])
    scores = Scores(
        Operand(queries, permuted(query, (*batch, i, d))),
        Operand(keys, permuted(key, (*batch, j, d))),
        nodes,
    )
    if call.op != "baddbmm":
        return scores
    bias, _, _, beta, alpha = call.args
    if not is_tensor(bias) or beta not in (0, 1):
        return None
    return scores._replace(scale=alpha, bias=bias if beta == 1 else None)


def product_of_weights(node: Any) -> Weighted | None:
    """Return the product of weights and values that `node` computes, or None."""
    product = _matrix_product(node)
    if product is None or product[0].op == "baddbmm":
        return None
    _, (weights, values), (first, second, result) = product
    *batch, i, j = first
    d = next(iter(set(second) - set(first)), "")
    if set(second) != {*batch, j, d} or set(result) != {*batch, i, d}:
        return None
    value_views = permuted(second, (*batch, j, d))
    return Weighted(weights, Operand(values, value_views), permuted((*batch, i, d), result))


def _matrix_product(node: Any) -> tuple[Call, Sequence[fx.Node], list[Sequence[str]]] | None:
    """Return the product of two tensors of 3 or 4 dimensions that `node` computes, or None.

    Return the call, its operands, and einsum's subscripts of the operands and of the result. All
    subscripts of a tensor differ: a repeated one would be a diagonal.
    """
    call = canonical(node)
    if call is None or call.op not in ("matmul", "baddbmm", "einsum"):
        return None
    equation, operands = "...id,...dj->...ij", call.args[:2]
    if call.op == "baddbmm":
        operands = call.args[1:3]
    elif call.op == "einsum":
        equation, operands = call.args
    if len(operands) != 2 or not isinstance(equation, str) or not all(map(is_tensor, operands)):
        return None
    dim = value(operands[0]).dim()
    left, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    first, second, result = (
        subscripts.replace("...", "?!"[: dim - 2]) for subscripts in (first, second, result)
    )
    if not arrow or not dim == value(operands[1]).dim() in (3, 4):
        return None
    if any(
        len(set(subscripts)) != dim or len(subscripts) != dim
        for subscripts in (first, second, result)
    ):
        return None
    return call, operands, [first, second, result]


def permuted(subscripts: Sequence[Any], order: Sequence[Any]) -> tuple[View, ...]:
    """Return the views that bring dimensions with `subscripts` into the order `order`."""
    dims = tuple(list(subscripts).index(letter) for letter in order)
    permuted = [position - len(dims) for position, dim in enumerate(dims) if position != dim]
    if not permuted:
        return ()
    # Rewrites that follow recognise a transposition, and no permutation.
    return ((torch.transpose, *permuted) if len(permuted) == 2 else (torch.permute, dims),)
