"""Sums and products of indices and numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..canonical import value as traced
from ..index_algebra import (
    Affine,
    Unknown,
    Value,
    affine,
    at_least,
    both,
    choose,
    either,
    everywhere,
    lift,
    number,
    truth,
)
from ..index_function import IndexFunctions, rule, shape_of
from .logic import elementwise


@rule("add")
def _add(of: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
    x, y = of.shaped(x, shape_of(node)), of.shaped(y, shape_of(node))
    if traced(node).dtype == torch.bool:
        return either(truth(x), truth(y))
    return lift(operator.add, number(x), number(y))


@rule("mul", "multiply")
def _mul(of: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
    x, y = of.shaped(x, shape_of(node)), of.shaped(y, shape_of(node))
    if traced(node).dtype == torch.bool:
        return both(truth(x), truth(y))
    return lift(
        lambda a, b: b.times(a.constant) if not a.slopes else a.times(_factor(b)),
        number(x),
        number(y),
    )


def _factor(value: Affine) -> Any:
    if value.slopes:
        raise Unknown("it multiplies two indices")
    return value.constant


elementwise("sub", operator.sub, "subtract")
elementwise("neg", lambda x: x.times(-1), "negative")
elementwise("abs", lambda x: choose(at_least(x, affine(0)), x, x.times(-1)))


@rule("floordiv", "floor_divide")
def _floor_divide(of: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
    """0 where the dividend is known to be in [0, divisor): chunks longer than the sequence."""
    shape = shape_of(node)
    x, y = number(of.shaped(x, shape)), number(of.shaped(y, shape))
    if not isinstance(x, Affine) or not isinstance(y, Affine):
        raise Unknown(f"{node.name} divides numbers that are not known")
    below = both(at_least(x, affine(0)), at_least(y, x + affine(1)))
    if everywhere(shape).decide(below) is not True:
        raise Unknown(f"{node.name} divides indices that may be as large as the divisor")
    return affine(0)
