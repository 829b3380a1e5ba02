"""The nodes of a graph that are known functions of their indices: masks, and what they are made of.

`IndexFunctions().value(node)` is such a function; `Unknown` is raised, with its reason, where
there is none: at inputs of the graph, at operations that are not in the table below, and where
arithmetic in the dtype could differ from that of whole numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import value as traced
from .index_algebra import (
    Affine,
    Condition,
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
    equal,
    everywhere,
    index,
    is_condition,
    known,
    lift,
    negation,
    number,
)

# A mask of transformers is some 12 nodes deep; a model's residual stream is deeper than Python's
# stack.
DEPTH = 60

Rule = Callable[..., Value]
RULES: dict[Any, Rule] = {}
OPERATORS = {
    operator.and_: "and",
    operator.or_: "or",
    operator.xor: "xor",
    operator.invert: "not",
    operator.getitem: "getitem",
    getattr: "getattr",
}


class IndexFunctions:
    """The functions of one graph.

    A subgraph's placeholders are what `outer`, the functions of the graph that calls it, knows of
    the call's operands.
    """

    def __init__(
        self,
        outer: IndexFunctions | None = None,
        operands: Mapping[fx.Node, Any] | None = None,
    ) -> None:
        self.outer = outer
        self.operands = operands or {}
        self._values: dict[fx.Node, Value | Unknown] = {}
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        if node not in self._values:
            self._depth += 1
            try:
                self._values[node] = self._found(node)
            except Unknown as unknown:
                self._values[node] = Unknown(*unknown.args)
            finally:
                self._depth -= 1
        value = self._values[node]
        if isinstance(value, Unknown):
            raise Unknown(*value.args)
        return value

    def read(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes whose values make that of `node`, itself first."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            part = waiting.pop()
            if part in found or part not in self._values:
                continue
            found.add(part)
            yield part
            waiting += part.all_input_nodes
            if part in self.operands and self.outer is not None:
                yield from self.outer.read(self.operands[part])

    def shaped(self, argument: Any, shape: Sequence[Size]) -> Value:
        """An operand as a function of the indices of a tensor that it is broadcast to."""
        example = traced(argument)
        if isinstance(example, Tensor):
            return broadcast(self.value(argument), example.shape, shape)
        if isinstance(example, bool):
            return example
        if isinstance(example, (int, float, torch.SymInt)):
            return affine(example)
        raise Unknown(f"{argument} is not a number that is known while the graph is compiled")

    def _found(self, node: fx.Node) -> Value:
        if self._depth > DEPTH:
            raise Unknown(f"it hangs on more than {DEPTH} operations")
        if node.op == "placeholder" and self.outer is not None and node in self.operands:
            return self.outer.value(self.operands[node])
        if node.op in ("placeholder", "get_attr"):
            raise Unknown(f"it depends on the values of {node.name}, which the graph is given")
        example = traced(node)
        if not isinstance(example, Tensor) or example.layout is not torch.strided:
            raise Unknown(f"{node.name} is not a dense tensor")
        rule = RULES.get(operation(node))
        if rule is None:
            raise Unknown(f"it depends on {node.name}, which is not made from its indices alone")
        try:
            value = rule(self, node, *node.args, **node.kwargs)
        except TypeError:
            raise Unknown(f"{node.name} has arguments that are not known here") from None
        return settled(value, example)


def operation(node: fx.Node) -> str | None:
    """The name of what a node does; of a function only where it is PyTorch's own."""
    if node.op == "call_method":
        name = str(node.target)
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        return "not" if name == "invert" else name
    if node.op != "call_function":
        return None
    if node.target in OPERATORS:
        return OPERATORS[node.target]
    name = getattr(node.target, "__name__", "")
    owners = (operator, torch, torch.nn.functional)
    return name if any(getattr(owner, name, None) is node.target for owner in owners) else None


def broadcast(value: Value, shape: Sequence[Size], to: Sequence[Size]) -> Value:
    """The same function, where it is one: the indices that matter have the same range in both."""
    for axis in axes_of(value):
        if -axis > len(to) or not known(shape[axis] == to[axis]):
            raise Unknown(f"the sizes {tuple(shape)} and {tuple(to)} are not known to agree")
    return value


def settled(value: Value, example: Tensor) -> Value:
    """The value as the tensor holds it: in its dtype, and free of the indices that are always 0."""
    alone = {
        axis: affine(0)
        for axis in axes_of(value)
        if -axis <= example.dim() and known(example.shape[axis] == 1)
    }
    value = at(value, alone) if alone else value
    dtype = example.dtype
    if dtype == torch.bool:
        if is_condition(value):
            return value
        return negation(lift(lambda x: equal(x, affine(0)), value))
    numbers = lift(lambda leaf: held(leaf, dtype), number(value))
    return everywhere(example.shape).simplified(numbers)


def held(leaf: Affine, dtype: torch.dtype) -> Affine:
    """A number as the dtype holds it; Unknown where rounding or overflow might change it.

    Floats are 0, 1 or -1, infinite, or so large that only their sign matters.
    """
    constant, slopes = leaf.constant, leaf.slopes
    if dtype.is_floating_point:
        if isinstance(constant, (int, float)) and not slopes:
            constant = float(constant)
            if abs(constant) > torch.finfo(dtype).max:
                constant = float("inf") if constant > 0 else -float("inf")
            if constant in (0.0, 1.0, -1.0) or abs(constant) >= 1e30:
                return affine(constant)
    elif isinstance(constant, float):
        if constant in (0.0, 1.0):
            return affine(int(constant))
    elif dtype in (torch.int64, torch.int32):
        bits = torch.iinfo(dtype).bits
        small = isinstance(constant, torch.SymInt) or abs(constant) < 2 ** (bits - 2)
        if small and sum(map(abs, slopes.values())) <= (2 if bits == 32 else 2**20):
            return leaf
    elif not slopes and not isinstance(constant, torch.SymInt) and constant in (0, 1):
        return leaf
    raise Unknown(f"it holds numbers that {dtype} may round or overflow")


def rule(*names: str) -> Callable[[Rule], Rule]:
    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def shape_of(node: Any) -> Sequence[Size]:
    return traced(node).shape


def axis_of(node: fx.Node, dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise Unknown(f"a dimension of {node.name} is not a constant")
    return dim - traced(node).dim() if dim >= 0 else dim


def size(argument: Any) -> Size:
    """A whole number that is known, as itself or by its symbol."""
    example = traced(argument)
    if isinstance(example, bool) or not isinstance(example, (int, torch.SymInt)):
        raise Unknown(f"{argument} is not a whole number that is known")
    return example


def accept(options: Mapping[str, Any], *names: str) -> None:
    """Refuse options other than those that say where and how a tensor is kept."""
    if set(options) - {*names, "device", "layout", "requires_grad", "pin_memory"}:
        raise Unknown(f"the options {sorted(options)} are not known here")


# What makes a tensor


@rule("arange")
def _arange(of: IndexFunctions, node: fx.Node, *ends: Any, **options: Any) -> Value:
    accept(options, "dtype", "start", "end", "step")
    given = dict(zip(("start", "end", "step"), ends if len(ends) > 1 else (0, *ends), strict=False))
    given.update({name: options[name] for name in ("start", "end", "step") if name in options})
    step = size(given.get("step", 1))
    return affine(size(given["start"])) + index(-1).times(step)


@rule("ones", "new_ones", "ones_like")
def _ones(of: IndexFunctions, node: fx.Node, *shape: Any, **options: Any) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(1)


@rule("zeros", "new_zeros", "zeros_like")
def _zeros(of: IndexFunctions, node: fx.Node, *shape: Any, **options: Any) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(0)


@rule("full", "full_like")
def _full(of: IndexFunctions, node: fx.Node, shape: Any, fill_value: Any, **options: Any) -> Value:
    accept(options, "dtype", "memory_format")
    return of.shaped(fill_value, ())


@rule("new_full")
def _new_full(
    of: IndexFunctions, node: fx.Node, like: Any, size: Any, fill_value: Any, **options: Any
) -> Value:
    accept(options, "dtype")
    return of.shaped(fill_value, ())


@rule("tensor", "scalar_tensor")
def _tensor(of: IndexFunctions, node: fx.Node, data: Any, **options: Any) -> Value:
    accept(options, "dtype")
    return of.shaped(data, ())


# What moves or repeats elements


@rule("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
def _same_elements(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """Dimensions of size 1 come and go; merging or splitting others is unknown."""
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


@rule("transpose", "swapaxes", "swapdims")
def _transpose(of: IndexFunctions, node: fx.Node, x: Any, dim0: Any, dim1: Any) -> Value:
    first, second = axis_of(node, dim0), axis_of(node, dim1)
    return at(of.value(x), {first: index(second), second: index(first)})


@rule("t")
def _t(of: IndexFunctions, node: fx.Node, x: Any) -> Value:
    return at(of.value(x), {-1: index(-2), -2: index(-1)}) if traced(x).dim() == 2 else of.value(x)


@rule("getattr")
def _getattr(of: IndexFunctions, node: fx.Node, x: Any, name: str) -> Value:
    if name == "mT" or (name == "T" and traced(x).dim() == 2):
        return _transpose(of, node, x, -1, -2)
    raise Unknown(f"it reads the attribute {name}")


@rule("permute")
def _permute(of: IndexFunctions, node: fx.Node, x: Any, *dims: Any) -> Value:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return at(
        of.value(x),
        {axis_of(node, dim): index(place - len(dims)) for place, dim in enumerate(dims)},
    )


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
    """A place in a dimension, that may be counted from its end."""
    place = size(place)
    if known(place < 0):
        place = place + length
    if not known(place >= 0):
        raise Unknown(f"the place {place} in a dimension of {length} may be counted from its end")
    return place


def _gathered(of: IndexFunctions, node: fx.Node, x: Any, items: tuple[Any, ...]) -> Value:
    """x[i, j, ...] with tensors of places for its first dimensions, each known to be in range."""
    sizes, shape = shape_of(x), shape_of(node)
    if any(not isinstance(traced(item), Tensor) for item in items):
        raise Unknown(f"{node.name} is indexed by tensors and by slices at once")
    rest = len(sizes) - len(items)
    places = {axis: index(axis) for axis in range(-rest, 0)}
    for axis, item in enumerate(items, start=-len(sizes)):
        if traced(item).dtype not in (torch.int64, torch.int32):
            raise Unknown(f"{node.name} selects by a mask")
        place = of.shaped(item, shape[: len(shape) - rest])
        if not isinstance(place, Affine):
            raise Unknown(f"{node.name} is indexed by places that are not known")
        place = at(place, {other: index(other - rest) for other in axes_of(place)})
        inside = both(at_least(place, affine(0)), at_least(affine(sizes[axis]), place + affine(1)))
        if everywhere(shape).decide(inside) is not True:
            raise Unknown(f"{node.name} is indexed by places that may be out of range")
        places[axis] = place
    return at(of.value(x), places)


@rule("contiguous", "clone", "detach", "to", "type", "type_as", "bool", "int", "long", "float")
@rule("half", "double", "bfloat16", "cuda", "cpu")
def _cast(of: IndexFunctions, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    return of.value(x)


# Comparisons and logic


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
elementwise("neg", lambda x: x.times(-1), "negative")
elementwise("abs", lambda x: choose(at_least(x, affine(0)), x, x.times(-1)))


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


def truth(value: Value) -> Condition:
    if is_condition(value):
        return value
    return negation(lift(lambda x: equal(x, affine(0)), value))


logical("and", both)
logical("or", either)
logical("xor", differ)
logical("not", negation)


# Arithmetic


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


# Along a dimension


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
