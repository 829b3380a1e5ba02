"""The two matrix products of attention: queries with keys, and weights with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..engine.canonical import Call, calls, canonical, is_tensor, value
from ..engine.rewrite import View, viewed


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph, and the views of it that bring it into attention's form."""

    source: fx.Node
    views: tuple[View, ...] = ()

    def viewed(self, *views: View) -> Operand:
        return replace(self, views=(*self.views, *views))

    def before(self, at: fx.Node) -> fx.Node:
        """The operand as a node, with its views inserted before `at`."""
        return viewed(at, self.source, self.views)


class Scores(NamedTuple):
    """query @ key^T, times `scale`, plus `bias`."""

    query: Operand
    key: Operand
    nodes: tuple[fx.Node, ...]
    scale: Any = 1.0
    bias: fx.Node | None = None


class Weighted(NamedTuple):
    """weights @ value; `back` brings (..., S, D) into the form of the result."""

    weights: fx.Node
    value: Operand
    back: tuple[View, ...] = ()


def product_of_scores(node: Any) -> Scores | None:
    call = canonical(node)
    if call is None:
        return None
    if call.op == "matmul" and _are_products(*call.args):
        return _of_matmul(node, *call.args)
    if call.op == "baddbmm":
        bias, query, key, beta, alpha = call.args
        if _are_products(query, key) and is_tensor(bias) and beta in (0, 1):
            scores = _of_matmul(node, query, key)
            return scores._replace(scale=alpha, bias=bias if beta == 1 else None)
    return _of_einsum(node, call) if call.op == "einsum" else None


def product_of_weights(node: Any) -> Weighted | None:
    call = canonical(node)
    if call is None:
        return None
    if call.op == "matmul" and _are_products(*call.args):
        return Weighted(call.args[0], Operand(call.args[1]))
    terms = _terms(call)
    if terms is None:
        return None
    (weights, values), (first, second), result = call.args[1], terms[:2], terms[2]
    *batch, i, j = list(first)
    d = next(iter(set(second) - set(first)), "")
    if set(second) != {*batch, j, d} or set(result) != {*batch, i, d}:
        return None
    value_views = _permuted(second, (*batch, j, d))
    return Weighted(weights, Operand(values, value_views), _permuted((*batch, i, d), result))


def _are_products(*operands: Any) -> bool:
    return all(isinstance(one, fx.Node) and is_tensor(one) for one in operands) and (
        value(operands[0]).dim() == value(operands[1]).dim() in (3, 4)
    )


def _of_matmul(node: fx.Node, query: fx.Node, key: fx.Node) -> Scores:
    turned = calls(key, "transpose")
    if turned is not None and turned.args[1] == (-2, -1):
        return Scores(Operand(query), Operand(turned.args[0]), (node, key))
    return Scores(Operand(query), Operand(key, ((torch.transpose, -2, -1),)), (node,))


def _of_einsum(node: fx.Node, call: Call) -> Scores | None:
    terms = _terms(call)
    if terms is None:
        return None
    *batch, i, j = list(terms[2])
    operands = dict(zip(terms[:2], call.args[1], strict=True))
    if len(operands) != 2:
        return None
    query = next((term for term in terms[:2] if i in term and j not in term), None)
    key = next((term for term in terms[:2] if j in term and i not in term), None)
    if query is None or key is None:
        return None
    d = next(iter(set(query) - set(terms[2])), "")
    if set(query) != {*batch, i, d} or set(key) != {*batch, j, d}:
        return None
    return Scores(
        Operand(operands[query], _permuted(query, (*batch, i, d))),
        Operand(operands[key], _permuted(key, (*batch, j, d))),
        (node,),
    )


def _terms(call: Call) -> tuple[str, str, str] | None:
    """The subscripts of two operands and the result, of 3 or 4 different letters each."""
    if call.op != "einsum" or len(call.args[1]) != 2 or not isinstance(call.args[0], str):
        return None
    left, arrow, result = call.args[0].replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    terms = (first, second, result)
    if not arrow or not _are_products(*call.args[1]):
        return None
    if any("..." in term for term in terms):
        dims = value(call.args[1][0]).dim() - 2
        terms = tuple(term.replace("...", "?!"[:dims]) for term in terms)  # type: ignore[assignment]
    dim = value(call.args[1][0]).dim()
    return terms if all(len(set(t)) == len(t) == dim for t in terms) else None


def _permuted(term: Sequence[str], to: Sequence[str]) -> tuple[View, ...]:
    dims = tuple(list(term).index(letter) for letter in to)
    moved = [place for place, dim in enumerate(dims) if place != dim]
    if not moved:
        return ()
    # A transposition is what rewrites that follow recognise.
    return ((torch.transpose, *moved) if len(moved) == 2 else (torch.permute, dims),)
