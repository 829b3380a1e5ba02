"""What sums or subtracts along a dimension."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..index_algebra import (
    Affine,
    Unknown,
    Value,
    affine,
    at,
    at_least,
    choose,
    everywhere,
    index,
    known,
    lift,
    number,
)
from ..index_function import IndexFunctions, accept, axis_of, rule, shape_of


@rule("cumsum")
def _cumsum(of: IndexFunctions, node: fx.Node, x: Any, dim: Any, **options: Any) -> Value:
    accept(options)
    value = everywhere(shape_of(x)).simplified(number(of.value(x)))
    if not isinstance(value, Affine) or value.slopes or not isinstance(value.constant, int):
        raise Unknown(f"{node.name} sums values that are not one constant")
    return index(axis_of(node, dim)).times(value.constant) + value


@rule("diff")
def _diff(
    of: IndexFunctions, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None
) -> Value:
    axis, value = axis_of(node, dim), number(of.value(x))
    if n != 1:
        raise Unknown(f"{node.name} is not a first difference")
    here = index(axis)
    if prepend is None:
        return lift(operator.sub, at(value, {axis: here + affine(1)}), value)
    if not known(shape_of(prepend)[axis] == 1):
        raise Unknown(f"{node.name} has more than one value before the first")
    before = number(of.value(prepend))
    return choose(
        at_least(affine(0), here),
        lift(operator.sub, at(value, {axis: affine(0)}), before),
        lift(operator.sub, value, at(value, {axis: here - affine(1)})),
    )
