"""Comparisons and logic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..canonical import value as traced
from ..index_algebra import (
    Unknown,
    Value,
    at_least,
    both,
    differ,
    either,
    equal,
    lift,
    negation,
    number,
    truth,
)
from ..index_function import IndexFunctions, rule, shape_of


def elementwise(name: str, function: Callable[..., Value], *more: str) -> None:
    """A rule for a function of numbers, of which the operands are broadcast."""

    def apply(of: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        shape = shape_of(node)
        return lift(function, *(number(of.shaped(operand, shape)) for operand in operands))

    rule(name, *more)(apply)


elementwise("ge", at_least, "greater_equal")
elementwise("le", lambda x, y: at_least(y, x), "less_equal")
elementwise("lt", lambda x, y: negation(at_least(x, y)), "less")
elementwise("gt", lambda x, y: negation(at_least(y, x)), "greater")
elementwise("eq", equal)
elementwise("ne", lambda x, y: negation(equal(x, y)), "not_equal")


def logical(name: str, function: Callable[..., Value], *more: str) -> None:
    """A rule for a function of truths: of booleans, or of anything by a logical_ function."""

    def apply(of: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        shape = shape_of(node)
        return function(*(truth(of.shaped(operand, shape)) for operand in operands))

    def apply_bitwise(of: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        if traced(node).dtype != torch.bool:
            raise Unknown(f"{node.name} works on the bits of integers")
        return apply(of, node, *operands)

    rule(f"logical_{name}")(apply)
    rule(name, f"bitwise_{name}", *more)(apply_bitwise)


logical("and", both)
logical("or", either)
logical("xor", differ)
logical("not", negation)
