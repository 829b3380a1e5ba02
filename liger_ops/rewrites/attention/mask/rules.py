"""How each PyTorch operation computes its result from the indices of its operands.

A rule takes the evaluation (`IndexFunctions`), the node and the node's arguments. It returns the
result as a function of its own indices, or raises `Unknown`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...engine.canonical import calls
from ...engine.canonical import value as traced
from .algebra import (
    Affine,
    Size,
    Unknown,
    Value,
    affine,
    at,
    at_least,
    axes_of,
    both,
    choose,
    differ,
    either,
    index,
    is_condition,
    known,
    lift,
    negation,
    number,
    quotient,
    truth,
)
from .region import everywhere

if TYPE_CHECKING:
    from .evaluate import IndexFunctions

Rule = Callable[..., Value]
# Keyed by what `canonical.operation` returns.
RULES: dict[str | None, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def shape_of(node: Any) -> Sequence[Size]:
    example = traced(node)
    if not isinstance(example, Tensor):
        raise Unknown(f"{node} is not a tensor")
    return example.shape


def axis_of(node: fx.Node, dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise Unknown(f"a dimension of {node.name} is not a constant")
    return dim - traced(node).dim() if dim >= 0 else dim


def size(argument: Any) -> Size:
    """An integer argument, concrete or symbolic."""
    example = traced(argument)
    if isinstance(example, bool) or not isinstance(example, (int, torch.SymInt)):
        raise Unknown(f"{argument} is not an integer that is known at compile time")
    return example


def accept(options: Mapping[str, Any], *names: str) -> None:
    """Raise Unknown for options other than `names` and those of where a tensor is stored."""
    if set(options) - {*names, "device", "layout", "requires_grad", "pin_memory"}:
        raise Unknown(f"the options {sorted(options)} have no rule")


@rule("arange")
def _arange(of: IndexFunctions, node: fx.Node, *ends: Any, **options: Any) -> Value:
    accept(options, "dtype", "start", "end", "step")
    given = dict(zip(("start", "end", "step"), ends if len(ends) > 1 else (0, *ends), strict=False))
    given.update({name: options[name] for name in ("start", "end", "step") if name in options})
    step = size(given.get("step", 1))
    return affine(size(given["start"])) + index(-1).times(step)


def _of_numbers(
    number: int, of: IndexFunctions, node: fx.Node, *shape: Any, **options: Any
) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(number)


for _number, _name in enumerate(("zeros", "ones")):
    rule(_name, f"new_{_name}", f"{_name}_like")(functools.partial(_of_numbers, _number))


@rule("full", "full_like", "new_full", "tensor", "scalar_tensor")
def _full(of: IndexFunctions, node: fx.Node, *args: Any, **options: Any) -> Value:
    accept(options, "dtype", "memory_format", "fill_value")
    return of.shaped(options["fill_value"] if "fill_value" in options else args[-1], ())


@rule("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
def _same_elements(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """Adds or removes dimensions of size 1. Merging or splitting other dimensions is unknown."""
    if traced(x).dtype != traced(node).dtype:
        raise Unknown(f"{node.name} reads the bytes of one dtype as another")
    before, after = (
        [axis for axis in range(-len(shape), 0) if not known(shape[axis] == 1)]
        for shape in (shape_of(x), shape_of(node))
    )
    if len(before) != len(after) or not all(
        known(shape_of(x)[old] == shape_of(node)[new])
        for old, new in zip(before, after, strict=True)
    ):
        raise Unknown(f"{node.name} merges or splits dimensions")
    return at(of.value(x), {old: index(new) for old, new in zip(before, after, strict=True)})


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _expanded(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    return of.shaped(x, shape_of(node))


@rule("transpose", "swapaxes", "swapdims", "t", "T", "mT", "mH", "H", "adjoint")
def _transpose(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    if traced(x).dim() < 2:
        return of.value(x)
    call = calls(node, "transpose")
    if call is None:
        raise Unknown(f"{node.name} is not a transposition of two dimensions")
    first, second = call.args[1]
    return at(of.value(x), {first: index(second), second: index(first)})


@rule("permute")
def _permute(of: IndexFunctions, node: fx.Node, x: Any, *dims: Any) -> Value:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return at(
        of.value(x),
        {axis_of(node, dim): index(place - len(dims)) for place, dim in enumerate(dims)},
    )


@rule("contiguous", "clone", "detach", "to", "type", "type_as", "bool", "int", "long", "float")
@rule("half", "double", "bfloat16", "cuda", "cpu")
def _cast(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """The same numbers, or Unknown if the dtype of `node` does not hold one of them (`settled`)."""
    return of.value(x)


@rule("getitem")
def _getitem(of: IndexFunctions, node: fx.Node, x: Any, items: Any) -> Value:
    items = tuple(items) if isinstance(items, (tuple, list)) else (items,)
    if any(isinstance(traced(item), Tensor) for item in items):
        return _gathered(of, node, x, items)
    sizes = shape_of(x)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    rest = (slice(None),) * (len(sizes) - taken)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items = (*items[:place], *rest, *items[place + 1 :])
    else:
        items = (*items, *rest)
    places: dict[int, Affine] = {}
    axis, out = -len(sizes), -len(shape_of(node))
    for item in items:
        if item is None:
            out += 1
        elif isinstance(item, slice):
            start = 0 if item.start is None else from_left(item.start, sizes[axis])
            step = 1 if item.step is None else size(item.step)
            places[axis] = affine(start) + index(out).times(step)
            axis, out = axis + 1, out + 1
        else:
            places[axis] = affine(from_left(item, sizes[axis]))
            axis += 1
    return at(of.value(x), places)


def from_left(place: Any, length: Size) -> Size:
    """A position in a dimension, converted if it is negative."""
    place = size(place)
    if known(place < 0):
        place = place + length
    if not known(place >= 0):
        raise Unknown(f"the position {place} in a dimension of {length} may be negative")
    return place


def _gathered(of: IndexFunctions, node: fx.Node, x: Any, items: tuple[Any, ...]) -> Value:
    """x[i, j, ...] with index tensors for the first dimensions, each proved to be in range."""
    sizes, shape = shape_of(x), shape_of(node)
    if any(not isinstance(traced(item), Tensor) for item in items):
        raise Unknown(f"{node.name} is indexed by both tensors and slices")
    rest = len(sizes) - len(items)
    places = {axis: index(axis) for axis in range(-rest, 0)}
    for axis, item in enumerate(items, start=-len(sizes)):
        if traced(item).dtype not in (torch.int64, torch.int32):
            raise Unknown(f"{node.name} selects by a mask")
        place = of.shaped(item, shape[: len(shape) - rest])
        if not isinstance(place, Affine):
            raise Unknown(f"{node.name} is indexed by positions that are not known")
        place = at(place, {other: index(other - rest) for other in axes_of(place)})
        inside = both(at_least(place, affine(0)), at_least(affine(sizes[axis]), place + affine(1)))
        if everywhere(shape).decide(inside) is not True:
            raise Unknown(f"{node.name} is indexed by positions that may be out of range")
        places[axis] = place
    return at(of.value(x), places)


def elementwise(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rule of an elementwise function of numbers; operands are broadcast."""

    def apply(of: IndexFunctions, node: fx.Node, *operands: Any) -> Value:
        shape = shape_of(node)
        return lift(function, *(number(of.shaped(operand, shape)) for operand in operands))

    rule(name, *more)(apply)


def logical(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rules of a logical function: for booleans, and as logical_* for any dtype."""

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


def arithmetic(
    name: str, numbers: Callable[..., Value], booleans: Callable[..., Value], *more: str
) -> None:
    """Register the rule of an elementwise function that has another meaning for booleans."""

    def apply(of: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
        x, y = of.shaped(x, shape_of(node)), of.shaped(y, shape_of(node))
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


arithmetic("add", operator.add, either)
arithmetic("mul", _product, both, "multiply")
elementwise("sub", operator.sub, "subtract")
elementwise("rsub", lambda x, y: y - x)
elementwise("neg", lambda x: x.times(-1), "negative")
elementwise("abs", lambda x: choose(at_least(x, affine(0)), x, x.times(-1)))


@rule("floordiv", "floor_divide")
def _floor_divide(of: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
    shape = shape_of(node)
    x, y = number(of.shaped(x, shape)), number(of.shaped(y, shape))
    if not isinstance(x, Affine) or not isinstance(y, Affine):
        raise Unknown(f"{node.name} divides numbers that depend on a condition")
    below = both(at_least(x, affine(0)), at_least(y, x + affine(1)))
    if everywhere(shape).decide(below) is True:
        return affine(0)
    if not y.is_constant or not isinstance(y.constant, int) or y.constant < 1:
        raise Unknown(f"{node.name} divides by a number that is not a positive constant")
    return quotient(x, y.constant)


@rule("cumsum")
def _cumsum(of: IndexFunctions, node: fx.Node, x: Any, dim: Any, **options: Any) -> Value:
    accept(options)
    value = everywhere(shape_of(x)).simplified(number(of.value(x)))
    if not isinstance(value, Affine) or not value.is_constant or isinstance(value.constant, float):
        raise Unknown(f"{node.name} sums values that are not all the same constant")
    if isinstance(value.constant, torch.SymInt):
        raise Unknown(f"{node.name} sums a size")
    return index(axis_of(node, dim)).times(value.constant) + value


@rule("sum")
def _sum(of: IndexFunctions, node: fx.Node, x: Any, dim: Any, **options: Any) -> Value:
    """0 if every element is proved to be 0, as the count of padding tokens where there are none."""
    accept(options)
    value = everywhere(shape_of(x)).simplified(number(of.value(x)))
    if isinstance(value, Affine) and value.is_constant and known(value.constant == 0):
        return affine(0)
    raise Unknown(f"{node.name} is a sum of values that are not all 0")


@rule("diff")
def _diff(
    of: IndexFunctions, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None
) -> Value:
    axis, value = axis_of(node, dim), number(of.value(x))
    if n != 1:
        raise Unknown(f"{node.name} is not a difference of first order")
    here = index(axis)
    if prepend is None:
        return lift(operator.sub, at(value, {axis: here + affine(1)}), value)
    if not known(shape_of(prepend)[axis] == 1):
        raise Unknown(f"{node.name} prepends more than one value")
    before = number(of.value(prepend))
    return choose(
        at_least(affine(0), here),
        lift(operator.sub, at(value, {axis: affine(0)}), before),
        lift(operator.sub, value, at(value, {axis: here - affine(1)})),
    )


@rule("where")
def _where(of: IndexFunctions, node: fx.Node, first: Any, second: Any, third: Any) -> Value:
    condition, yes = (second, first) if node.op == "call_method" else (first, second)
    return chosen(of, node, condition, yes, third)


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
    return triangle(of.value(x), at_least(index(-2) + affine(size(diagonal)), index(-1)))


@rule("triu")
def _triu(of: IndexFunctions, node: fx.Node, x: Any, diagonal: Any = 0) -> Value:
    return triangle(of.value(x), at_least(index(-1), index(-2) + affine(size(diagonal))))


def triangle(value: Value, kept: Any) -> Value:
    return both(kept, value) if is_condition(value) else choose(kept, value, affine(0))
