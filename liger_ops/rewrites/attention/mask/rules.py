"""Rules: the result of a PyTorch operation as a function of its indices.

A rule takes the evaluation (`IndexFunctions`), the node and the node's arguments. It returns the
result as a function of its own indices, or raises `Unknown`.

PyTorch compares in the dtype of the result of arithmetic, and converts a number to the dtype of the
tensor: as uint8, -1 is 255. The rules of comparisons do the same.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...engine.canonical import value as traced
from ...engine.casts import represents
from ...engine.maps.algebra import (
    Affine,
    Number,
    Size,
    Unknown,
    Value,
    affine,
    always_true,
    at_least,
    axes_of,
    choose,
    conjunction,
    disjunction,
    equal,
    exclusive_or,
    index,
    is_condition,
    lift,
    negation,
    number,
    quotient,
    substitute,
    truth,
)
from ...engine.maps.index_maps import shape_of, size
from ..numbers import rounded
from .proof import everywhere

if TYPE_CHECKING:
    from .evaluate import IndexFunctions

Rule = Callable[..., Value]
# Keyed by what `canonical.operation` returns.
RULES: dict[str | None, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names."""

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def axis_of(node: fx.Node, dim: Any) -> int:
    """Return a dimension of `node`, counted from the right."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise Unknown(f"a dimension of {node.name} is not a constant")
    return dim - traced(node).dim() if dim >= 0 else dim


def accept(options: Mapping[str, Any], *names: str) -> None:
    """Raise Unknown for options that change values, but for `names`.

    The device, the layout, requires_grad and pin_memory change no value.
    """
    if set(options) - {*names, "device", "layout", "requires_grad", "pin_memory"}:
        raise Unknown(f"the options {sorted(options)} have no rule")


@rule("arange")
def _arange(functions: IndexFunctions, node: fx.Node, *ends: Any, **options: Any) -> Value:
    accept(options, "dtype", "start", "end", "step")
    limits = dict(
        zip(("start", "end", "step"), ends if len(ends) > 1 else (0, *ends), strict=False)
    )
    limits.update({name: options[name] for name in ("start", "end", "step") if name in options})
    step = size(limits.get("step", 1))
    return affine(size(limits["start"])) + index(-1).times(step)


def _filled_with(
    number: int, functions: IndexFunctions, node: fx.Node, *shape: Any, **options: Any
) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(number)


for _number, _name in enumerate(("zeros", "ones")):
    rule(_name, f"new_{_name}", f"{_name}_like")(functools.partial(_filled_with, _number))


@rule("full", "full_like", "new_full", "tensor", "scalar_tensor")
def _full(functions: IndexFunctions, node: fx.Node, *args: Any, **options: Any) -> Value:
    accept(options, "dtype", "memory_format", "fill_value")
    return functions.shaped(options["fill_value"] if "fill_value" in options else args[-1], ())


@rule("getitem")
def _gather(functions: IndexFunctions, node: fx.Node, x: Any, items: Any) -> Value:
    """Evaluate x[i, j, ...], with index tensors for the first dimensions, proved to be in range."""
    items = items if isinstance(items, tuple) else (items,)
    sizes, shape = shape_of(x), shape_of(node)
    if any(not isinstance(traced(item), Tensor) for item in items):
        raise Unknown(f"{node.name} is indexed by other than tensors or slices alone")
    rest = len(sizes) - len(items)
    indices = {axis: index(axis) for axis in range(-rest, 0)}
    for axis, item in enumerate(items, start=-len(sizes)):
        if traced(item).dtype not in (torch.int64, torch.int32):
            raise Unknown(f"{node.name} selects by a mask")
        position = functions.shaped(item, shape[: len(shape) - rest])
        if not isinstance(position, Affine):
            raise Unknown(f"{node.name} is indexed by positions that are not known")
        # As a function of the result's indices, which has `rest` more axes to the right.
        position = substitute(position, {other: index(other - rest) for other in axes_of(position)})
        inside = conjunction(
            at_least(position, affine(0)), at_least(affine(sizes[axis]), position + affine(1))
        )
        if everywhere(shape).decide(inside) is not True:
            raise Unknown(f"{node.name} is indexed by positions that may be out of range")
        indices[axis] = position
    # The result has the dimensions of the index tensors first, then the `rest` of x's.
    return substitute(functions.value(x), indices)


def elementwise(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rule of an elementwise function of numbers; operands are broadcast."""

    def apply(functions: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        shape = shape_of(node)
        return lift(function, *(number(functions.shaped(operand, shape)) for operand in operands))

    rule(name, *more)(apply)


def logical(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rules of a logical function.

    As `&` or bitwise_* it takes booleans alone, as logical_* the truth of any dtype.
    """

    def apply(functions: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        shape = shape_of(node)
        return function(*(truth(functions.shaped(operand, shape)) for operand in operands))

    def apply_bitwise(functions: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        if traced(node).dtype != torch.bool:
            raise Unknown(f"{node.name} works on the bits of integers")
        return apply(functions, node, *operands)

    rule(f"logical_{name}")(apply)
    rule(name, f"bitwise_{name}", *more)(apply_bitwise)


logical("and", conjunction)
logical("or", disjunction)
logical("xor", exclusive_or)
logical("not", negation)


def arithmetic(
    name: str, numbers: Callable[..., Value], booleans: Callable[..., Value], *more: str
) -> None:
    """Register the rule of an elementwise function with another meaning for booleans.

    The sum of two booleans is their disjunction, and the product their conjunction.
    """

    def apply(functions: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
        x, y = functions.shaped(x, shape_of(node)), functions.shaped(y, shape_of(node))
        if traced(node).dtype == torch.bool:
            return booleans(truth(x), truth(y))
        return lift(numbers, number(x), number(y))

    rule(name, *more)(apply)


def _product(x: Affine, y: Affine) -> Affine:
    return y.times(x.constant) if x.is_constant else x.times(_factor(y))


def _factor(value: Affine) -> Any:
    if not value.is_constant:
        raise Unknown("it multiplies two indices")
    return value.constant


arithmetic("add", operator.add, disjunction)
arithmetic("mul", _product, conjunction, "multiply")
elementwise("sub", operator.sub, "subtract")
elementwise("rsub", lambda x, y: y - x)
elementwise("neg", lambda x: x.times(-1), "negative")
elementwise("abs", lambda x: choose(at_least(x, affine(0)), x, x.times(-1)))


@rule("floordiv", "floor_divide")
def _floor_divide(functions: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
    shape = shape_of(node)
    x, y = number(functions.shaped(x, shape)), number(functions.shaped(y, shape))
    if not isinstance(x, Affine) or not isinstance(y, Affine):
        raise Unknown(f"{node.name} divides numbers that depend on a condition")
    # 0 <= x < y, where y may be symbolic.
    below = conjunction(at_least(x, affine(0)), at_least(y, x + affine(1)))
    if everywhere(shape).decide(below) is True:
        return affine(0)
    if not y.is_constant or not isinstance(y.constant, int) or y.constant < 1:
        raise Unknown(f"{node.name} divides by a number that is not a positive constant")
    return quotient(x, y.constant)


@rule("cumsum")
def _cumsum(functions: IndexFunctions, node: fx.Node, x: Any, dim: Any, **options: Any) -> Value:
    accept(options)
    value = everywhere(shape_of(x)).simplified(number(functions.value(x)))
    if not isinstance(value, Affine) or not value.is_constant or isinstance(value.constant, float):
        raise Unknown(f"{node.name} sums values that are not all the same constant")
    if isinstance(value.constant, torch.SymInt):
        raise Unknown(f"{node.name} sums a size")
    return index(axis_of(node, dim)).times(value.constant) + value


@rule("sum")
def _sum(functions: IndexFunctions, node: fx.Node, x: Any, dim: Any, **options: Any) -> Value:
    """Evaluate a sum of zeros, such as the number of padding tokens where there are none."""
    accept(options)
    value = everywhere(shape_of(x)).simplified(number(functions.value(x)))
    if isinstance(value, Affine) and value.is_constant and always_true(value.constant == 0):
        return affine(0)
    raise Unknown(f"{node.name} is a sum of values that are not all 0")


@rule("diff")
def _diff(
    functions: IndexFunctions, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None
) -> Value:
    axis, value = axis_of(node, dim), number(functions.value(x))
    if n != 1:
        raise Unknown(f"{node.name} is not a difference of first order")
    here = index(axis)
    if prepend is None:
        return lift(operator.sub, substitute(value, {axis: here + affine(1)}), value)
    if not always_true(shape_of(prepend)[axis] == 1):
        raise Unknown(f"{node.name} prepends more than one value")
    before = number(functions.value(prepend))
    return choose(
        at_least(affine(0), here),
        lift(operator.sub, substitute(value, {axis: affine(0)}), before),
        lift(operator.sub, value, substitute(value, {axis: here - affine(1)})),
    )


@rule("where")
def _where(functions: IndexFunctions, node: fx.Node, first: Any, second: Any, third: Any) -> Value:
    # x.where(condition, other) has the condition second.
    condition, yes = (second, first) if node.op == "call_method" else (first, second)
    return select(functions, node, condition, yes, third)


@rule("masked_fill")
def _masked_fill(functions: IndexFunctions, node: fx.Node, x: Any, mask: Any, value: Any) -> Value:
    return select(functions, node, mask, value, x)


def select(functions: IndexFunctions, node: fx.Node, condition: Any, yes: Any, no: Any) -> Value:
    condition, yes, no = (
        functions.shaped(operand, shape_of(node)) for operand in (condition, yes, no)
    )
    if traced(node).dtype == torch.bool:
        return choose(truth(condition), truth(yes), truth(no))
    return choose(truth(condition), number(yes), number(no))


@rule("tril")
def _tril(functions: IndexFunctions, node: fx.Node, x: Any, diagonal: Any = 0) -> Value:
    return triangle(functions.value(x), at_least(index(-2) + affine(size(diagonal)), index(-1)))


@rule("triu")
def _triu(functions: IndexFunctions, node: fx.Node, x: Any, diagonal: Any = 0) -> Value:
    return triangle(functions.value(x), at_least(index(-1), index(-2) + affine(size(diagonal))))


def triangle(value: Value, kept: Any) -> Value:
    return conjunction(kept, value) if is_condition(value) else choose(kept, value, affine(0))


def comparison(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rule of a comparison of two numbers."""

    def apply(functions: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
        dtype = torch.result_type(_typed(x), _typed(y))
        return lift(
            function, *(_converted(functions, operand, shape_of(node), dtype) for operand in (x, y))
        )

    rule(name, *more)(apply)


def _typed(operand: Any) -> Any:
    """Return a value by which PyTorch selects a dtype: a constant for a symbol, to add no guard."""
    example = traced(operand)
    if isinstance(example, (torch.SymInt, torch.SymFloat)):
        return 0 if isinstance(example, torch.SymInt) else 0.0
    if not isinstance(example, (Tensor, int, float)):
        raise Unknown(f"{operand} is not a number that is known at compile time")
    return example


def _converted(
    functions: IndexFunctions, operand: Any, shape: Sequence[Size], dtype: torch.dtype
) -> Number:
    """Return an operand as `dtype` stores it, such as float32 for an integer tensor and 0.5."""
    example = traced(operand)
    is_exact = isinstance(example, Tensor) and represents(dtype, example.dtype)

    def converted(leaf: Affine) -> Affine:
        constant = leaf.constant
        if is_exact or dtype == torch.bool:
            return leaf
        if leaf.is_constant and isinstance(constant, (int, float)):
            if dtype.is_floating_point:
                return affine(rounded(float(constant), dtype))
            if torch.iinfo(dtype).min <= constant <= torch.iinfo(dtype).max:
                return leaf
        # No size and no index is too large for these dtypes.
        elif not leaf.terms and dtype in (torch.int64, torch.int32):
            return leaf
        raise Unknown(f"it compares numbers that {dtype} may round or overflow")

    return lift(converted, number(functions.shaped(operand, shape)))


comparison("ge", at_least, "greater_equal")
comparison("le", lambda x, y: at_least(y, x), "less_equal")
comparison("lt", lambda x, y: negation(at_least(x, y)), "less")
comparison("gt", lambda x, y: negation(at_least(y, x)), "greater")
comparison("eq", equal)
comparison("ne", lambda x, y: negation(equal(x, y)), "not_equal")
