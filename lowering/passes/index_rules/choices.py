"""What chooses between two values by a condition, or by the triangle that an element is in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..canonical import value as traced
from ..index_algebra import (
    Value,
    affine,
    at_least,
    both,
    choose,
    index,
    is_condition,
    number,
    truth,
)
from ..index_function import IndexFunctions, rule, shape_of, size


@rule("where")
def _where(of: IndexFunctions, node: fx.Node, first: Any, second: Any, third: Any) -> Value:
    condition, yes, no = (first, second, third)
    if node.op == "call_method":
        condition, yes = second, first
    return chosen(of, node, condition, yes, no)


@rule("masked_fill")
def _masked_fill(of: IndexFunctions, node: fx.Node, x: Any, mask: Any, value: Any) -> Value:
    return chosen(of, node, mask, value, x)


def chosen(of: IndexFunctions, node: fx.Node, condition: Any, yes: Any, no: Any) -> Value:
    condition, yes, no = (of.shaped(part, shape_of(node)) for part in (condition, yes, no))
    if traced(node).dtype == torch.bool:
        return choose(truth(condition), truth(yes), truth(no))
    return choose(truth(condition), number(yes), number(no))


@rule("tril")
def _tril(of: IndexFunctions, node: fx.Node, x: Any, diagonal: Any = 0) -> Value:
    kept = at_least(index(-2) + affine(size(diagonal)), index(-1))
    return triangle(of.value(x), kept)


@rule("triu")
def _triu(of: IndexFunctions, node: fx.Node, x: Any, diagonal: Any = 0) -> Value:
    kept = at_least(index(-1), index(-2) + affine(size(diagonal)))
    return triangle(of.value(x), kept)


def triangle(value: Value, kept: Any) -> Value:
    return both(kept, value) if is_condition(value) else choose(kept, value, affine(0))
