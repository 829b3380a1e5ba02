"""Tensors as functions of their indices, and proofs about such functions.

Axes are counted from the right, -1 being the last, because broadcasting keeps that count. An
integer tensor is `Affine` in its indices and in `Term`s: elements of tensors of the graph, and
quotients. A boolean tensor is a tree of comparisons (`Condition`), and a tensor whose numbers
depend on a condition is a `Choice`. Sizes may be symbolic: a proof holds for every size that the
graph is compiled for, and adds no guard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Size = int | torch.SymInt
Key = TypeVar("Key")
LEAVES = 16


class Unknown(Exception):
    """A tensor cannot be evaluated as a function of its indices; the text says why."""


@dataclass(frozen=True, eq=False)
class Affine:
    """constant + sum(slopes[axis] * index[axis]) + sum(terms[term] * term)."""

    constant: Size | float
    slopes: Mapping[int, int]
    terms: Mapping[Term, int] = field(default_factory=dict)

    @property
    def is_constant(self) -> bool:
        return not self.slopes and not self.terms

    def __add__(self, other: Affine) -> Affine:
        return affine(
            self.constant + other.constant,
            _sum(self.slopes, other.slopes),
            _sum(self.terms, other.terms),
        )

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def times(self, factor: Size | float) -> Affine:
        if self.is_constant:
            return affine(self.constant * factor)
        if not isinstance(factor, int):
            raise Unknown("it multiplies an index by a number that is not a constant integer")
        return affine(
            self.constant * factor,
            {axis: slope * factor for axis, slope in self.slopes.items()},
            {term: slope * factor for term, slope in self.terms.items()},
        )


@dataclass(frozen=True, eq=False)
class Datum:
    """The element of an integer or boolean tensor of the graph at `places`, one for each axis."""

    node: fx.Node
    places: tuple[Affine, ...]

    def __hash__(self) -> int:
        return hash(self.node)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Datum)
            and self.node is other.node
            and all(map(same, self.places, other.places))
        )


@dataclass(frozen=True, eq=False)
class Quotient:
    """floor(dividend / divisor), for a positive divisor."""

    dividend: Affine
    divisor: int

    def __hash__(self) -> int:
        return hash(self.divisor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Quotient)
            and self.divisor == other.divisor
            and same(self.dividend, other.dividend)
        )


Term = Datum | Quotient


def _sum(left: Mapping[Key, int], right: Mapping[Key, int]) -> dict[Key, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}


def affine(
    constant: Size | float,
    slopes: Mapping[int, int] | None = None,
    terms: Mapping[Term, int] | None = None,
) -> Affine:
    return Affine(constant, _nonzero(slopes or {}), _nonzero(terms or {}))


def _nonzero(factors: Mapping[Key, int]) -> dict[Key, int]:
    return {key: factor for key, factor in factors.items() if factor}


def index(axis: int) -> Affine:
    return affine(0, {axis: 1})


@dataclass(frozen=True, eq=False)
class NonNegative:
    """The condition value >= 0."""

    value: Affine


@dataclass(frozen=True, eq=False)
class Not:
    of: Condition


@dataclass(frozen=True, eq=False)
class Both:
    left: Condition
    right: Condition


@dataclass(frozen=True, eq=False)
class Choice:
    """`yes` where the condition holds, else `no`."""

    condition: Condition
    yes: Number
    no: Number


Condition = bool | NonNegative | Not | Both
Number = Affine | Choice
Value = Number | Condition


def is_condition(value: Value) -> TypeIs[Condition]:
    return not isinstance(value, (Affine, Choice))


def known(fact: bool | torch.SymBool) -> bool:
    """Whether `fact` holds at every size. Adds no guard."""
    return bool(statically_known_true(fact))


def negation(condition: Condition) -> Condition:
    if isinstance(condition, bool):
        return not condition
    return condition.of if isinstance(condition, Not) else Not(condition)


def both(left: Condition, right: Condition) -> Condition:
    if isinstance(left, bool):
        return right if left else False
    if isinstance(right, bool):
        return left if right else False
    return Both(left, right)


def either(left: Condition, right: Condition) -> Condition:
    return negation(both(negation(left), negation(right)))


def differ(left: Condition, right: Condition) -> Condition:
    return either(both(left, negation(right)), both(negation(left), right))


def choose(condition: Condition, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    if is_condition(yes):
        return either(both(condition, yes), both(negation(condition), no))
    if sum(1 for _ in itertools.chain(leaves(yes), leaves(no))) > LEAVES:
        raise Unknown(f"its numbers depend on more than {LEAVES} cases")
    return Choice(condition, yes, no)


def leaves(value: Number) -> Iterator[Affine]:
    if isinstance(value, Choice):
        yield from leaves(value.yes)
        yield from leaves(value.no)
    else:
        yield value


def lift(function: Callable[..., Any], *values: Number) -> Any:
    """Apply `function` to each combination of the values' cases."""
    for place, value in enumerate(values):
        if isinstance(value, Choice):
            before, after = values[:place], values[place + 1 :]
            return choose(
                value.condition,
                lift(function, *before, value.yes, *after),
                lift(function, *before, value.no, *after),
            )
    return function(*values)


def number(value: Value) -> Number:
    if isinstance(value, (Affine, Choice)):
        return value
    return choose(value, affine(1), affine(0))


def at_least(left: Affine, right: Affine) -> Condition:
    """left >= right. A float can be compared with constants only."""
    if isinstance(left.constant, float) or isinstance(right.constant, float):
        sides = (left.constant, right.constant)
        constants = left.is_constant and right.is_constant
        if not constants or any(isinstance(side, torch.SymInt) for side in sides):
            raise Unknown("it compares an index with a floating-point number")
        return bool(left.constant >= right.constant)
    difference = left - right
    if difference.is_constant and isinstance(difference.constant, int):
        return difference.constant >= 0
    return NonNegative(difference)


def equal(left: Affine, right: Affine) -> Condition:
    return both(at_least(left, right), at_least(right, left))


def quotient(dividend: Affine, divisor: int) -> Affine:
    """floor(dividend / divisor)."""
    if dividend.is_constant and isinstance(dividend.constant, int):
        return affine(dividend.constant // divisor)
    return affine(0, {}, {Quotient(dividend, divisor): 1})


def truth(value: Value) -> Condition:
    """The condition value != 0."""
    if is_condition(value):
        return value
    return negation(lift(lambda x: equal(x, affine(0)), value))


def at(value: Value, places: Mapping[int, Affine]) -> Any:
    """The value with the index of each axis in `places` replaced, simultaneously."""
    done: dict[int, Any] = {}

    def replaced(part: Any) -> Any:
        if isinstance(part, bool):
            return part
        if id(part) not in done:
            done[id(part)] = rebuilt(part)
        return done[id(part)]

    def term_at(term: Term) -> Affine:
        if isinstance(term, Quotient):
            return quotient(replaced(term.dividend), term.divisor)
        return affine(0, {}, {Datum(term.node, tuple(map(replaced, term.places))): 1})

    def rebuilt(part: Any) -> Any:
        if isinstance(part, Affine):
            total = affine(part.constant)
            for axis, slope in part.slopes.items():
                total = total + places.get(axis, index(axis)).times(slope)
            for term, slope in part.terms.items():
                total = total + term_at(term).times(slope)
            return total
        if isinstance(part, NonNegative):
            return at_least(replaced(part.value), affine(0))
        if isinstance(part, Not):
            return negation(replaced(part.of))
        if isinstance(part, Both):
            return both(replaced(part.left), replaced(part.right))
        return choose(replaced(part.condition), replaced(part.yes), replaced(part.no))

    return replaced(value)


def comparisons(condition: Condition) -> Iterator[NonNegative]:
    """The comparisons that a condition combines."""
    if isinstance(condition, NonNegative):
        yield condition
    elif isinstance(condition, Not):
        yield from comparisons(condition.of)
    elif isinstance(condition, Both):
        yield from comparisons(condition.left)
        yield from comparisons(condition.right)


def _affines(value: Value) -> Iterator[Affine]:
    """The affine functions that a value is made of, those in quotients and places included."""
    seen: set[int] = set()
    waiting: list[Any] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Affine):
            yield part
            for term in part.terms:
                waiting += term.places if isinstance(term, Datum) else [term.dividend]
        else:
            waiting += vars(part).values()


def axes_of(value: Value) -> set[int]:
    """The axes whose indices the value depends on."""
    return {axis for one in _affines(value) for axis in one.slopes}


def data_of(value: Value) -> set[Datum]:
    """The elements that the value depends on."""
    return {term for one in _affines(value) for term in one.terms if isinstance(term, Datum)}


def same(left: Affine, right: Affine) -> bool:
    if isinstance(left.constant, float) != isinstance(right.constant, float):
        return False
    return (
        left.slopes == right.slopes
        and left.terms == right.terms
        and known(left.constant == right.constant)
    )
