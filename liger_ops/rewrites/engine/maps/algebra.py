"""Tensors as functions of their indices: affine numbers, conditions and choices.

Axes are counted from the right, -1 being the last, because broadcasting keeps that count. An
integer tensor is `Affine` in its indices and in `Term`s: elements of tensors of the graph, and
quotients. A boolean tensor is a tree of comparisons (`Condition`), and a tensor whose numbers
depend on a condition is a `Choice`. Sizes may be symbolic: what is proved holds for every size that
the graph is compiled for, and adds no guard.
"""

from __future__ import annotations

import functools
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
# The most cases of a `Choice`. `lift` forms every combination of its operands' cases, so a chain of
# operations on choices would grow without a limit.
MAX_LEAVES = 16


class Unknown(Exception):
    """A tensor cannot be evaluated as a function of its indices; the text says why."""


@dataclass(frozen=True, eq=False)
class Affine:
    """The number constant + sum(slopes[axis] * index[axis]) + sum(terms[term] * term)."""

    constant: Size | float
    slopes: Mapping[int, int]
    terms: Mapping[Term, int] = field(default_factory=dict)

    @property
    def is_constant(self) -> bool:
        return not self.slopes and not self.terms

    def __add__(self, other: Affine) -> Affine:
        return affine(
            self.constant + other.constant,
            _add_coefficients(self.slopes, other.slopes),
            _add_coefficients(self.terms, other.terms),
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
    """The element of an integer or boolean tensor of the graph at `indices`, one for each axis."""

    node: fx.Node
    indices: tuple[Affine, ...]

    def __hash__(self) -> int:
        # The indices may hold symbolic sizes, which `same` compares and no hash could.
        return hash(self.node)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Datum)
            and self.node is other.node
            and all(map(same, self.indices, other.indices))
        )


@dataclass(frozen=True, eq=False)
class Quotient:
    """The integer floor(dividend / divisor), for a positive divisor."""

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


def _add_coefficients(left: Mapping[Key, int], right: Mapping[Key, int]) -> dict[Key, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}


def affine(
    constant: Size | float,
    slopes: Mapping[int, int] | None = None,
    terms: Mapping[Term, int] | None = None,
) -> Affine:
    """Return an `Affine` without coefficients that are 0."""
    return Affine(constant, _nonzero(slopes) if slopes else {}, _nonzero(terms) if terms else {})


def _nonzero(factors: Mapping[Key, int]) -> dict[Key, int]:
    return {key: factor for key, factor in factors.items() if factor}


@functools.cache
def index(axis: int) -> Affine:
    """Return the index along `axis` as a number."""
    return affine(0, {axis: 1})


@dataclass(frozen=True, eq=False)
class NonNegative:
    """The condition value >= 0."""

    value: Affine


@dataclass(frozen=True, eq=False)
class Not:
    operand: Condition


@dataclass(frozen=True, eq=False)
class And:
    left: Condition
    right: Condition


@dataclass(frozen=True, eq=False)
class Choice:
    """The number `yes` where the condition holds, else `no`."""

    condition: Condition
    yes: Number
    no: Number


Condition = bool | NonNegative | Not | And
Number = Affine | Choice
Value = Number | Condition


def is_condition(value: Value) -> TypeIs[Condition]:
    return not isinstance(value, (Affine, Choice))


def always_true(statement: bool | torch.SymBool) -> bool:
    """Return whether `statement` holds for every value of its symbolic sizes, without a guard."""
    return statement if isinstance(statement, bool) else bool(statically_known_true(statement))


def negation(condition: Condition) -> Condition:
    if isinstance(condition, bool):
        return not condition
    return condition.operand if isinstance(condition, Not) else Not(condition)


def conjunction(left: Condition, right: Condition) -> Condition:
    if isinstance(left, bool):
        return right if left else False
    if isinstance(right, bool):
        return left if right else False
    return And(left, right)


def disjunction(left: Condition, right: Condition) -> Condition:
    return negation(conjunction(negation(left), negation(right)))


def exclusive_or(left: Condition, right: Condition) -> Condition:
    return disjunction(conjunction(left, negation(right)), conjunction(negation(left), right))


def choose(condition: Condition, yes: Any, no: Any) -> Any:
    """Return `yes` where `condition` holds, else `no`: two conditions, or two numbers.

    Raises:
        Unknown: the result would have more than MAX_LEAVES cases.
    """
    if isinstance(condition, bool):
        return yes if condition else no
    if is_condition(yes):
        return disjunction(conjunction(condition, yes), conjunction(negation(condition), no))
    if sum(1 for _ in itertools.chain(leaves(yes), leaves(no))) > MAX_LEAVES:
        raise Unknown(f"its numbers depend on more than {MAX_LEAVES} cases")
    return Choice(condition, yes, no)


def leaves(value: Number) -> Iterator[Affine]:
    """Yield the number of each case of a value."""
    if isinstance(value, Choice):
        yield from leaves(value.yes)
        yield from leaves(value.no)
    else:
        yield value


def lift(function: Callable[..., Any], *values: Number) -> Any:
    """Apply `function` to each combination of the values' cases."""
    for position, value in enumerate(values):
        if isinstance(value, Choice):
            before, after = values[:position], values[position + 1 :]
            return choose(
                value.condition,
                lift(function, *before, value.yes, *after),
                lift(function, *before, value.no, *after),
            )
    return function(*values)


def number(value: Value) -> Number:
    """Return a value as a number: 1 or 0 for a condition."""
    if isinstance(value, (Affine, Choice)):
        return value
    return choose(value, affine(1), affine(0))


def at_least(left: Affine, right: Affine) -> Condition:
    """Return the condition left >= right.

    Raises:
        Unknown: a float is compared with an index or with a symbolic size.
    """
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
    """Return the condition left == right, as left >= right and right >= left."""
    return conjunction(at_least(left, right), at_least(right, left))


def quotient(dividend: Affine, divisor: int) -> Affine:
    """Return floor(dividend / divisor)."""
    if dividend.is_constant and isinstance(dividend.constant, int):
        return affine(dividend.constant // divisor)
    return affine(0, {}, {Quotient(dividend, divisor): 1})


def truth(value: Value) -> Condition:
    """Return the condition value != 0."""
    if is_condition(value):
        return value
    return negation(lift(lambda x: equal(x, affine(0)), value))


def substitute(value: Value, indices: Mapping[int, Affine]) -> Any:
    """Substitute `indices` for the indices of their axes in `value`, all at once.

    For x.transpose(-1, -2) they are {-1: index(-2), -2: index(-1)}; substituted one after the other
    they would give x's diagonal.
    """
    if isinstance(value, Affine) and value.is_constant:
        return value
    # Conditions share subexpressions, as in `exclusive_or`: each is visited once, by identity.
    visited: dict[int, Any] = {}

    def visit(expression: Any) -> Any:
        if isinstance(expression, bool):
            return expression
        if id(expression) not in visited:
            visited[id(expression)] = rebuild(expression)
        return visited[id(expression)]

    def visit_term(term: Term) -> Affine:
        if isinstance(term, Quotient):
            return quotient(visit(term.dividend), term.divisor)
        return affine(0, {}, {Datum(term.node, tuple(map(visit, term.indices))): 1})

    def rebuild(expression: Any) -> Any:
        if isinstance(expression, Affine):
            total = affine(expression.constant)
            for axis, slope in expression.slopes.items():
                total = total + indices.get(axis, index(axis)).times(slope)
            for term, slope in expression.terms.items():
                total = total + visit_term(term).times(slope)
            return total
        if isinstance(expression, NonNegative):
            return at_least(visit(expression.value), affine(0))
        if isinstance(expression, Not):
            return negation(visit(expression.operand))
        if isinstance(expression, And):
            return conjunction(visit(expression.left), visit(expression.right))
        return choose(visit(expression.condition), visit(expression.yes), visit(expression.no))

    return visit(value)


def comparisons(condition: Condition) -> Iterator[NonNegative]:
    """Yield the comparisons that a condition combines."""
    if isinstance(condition, NonNegative):
        yield condition
    elif isinstance(condition, Not):
        yield from comparisons(condition.operand)
    elif isinstance(condition, And):
        yield from comparisons(condition.left)
        yield from comparisons(condition.right)


def _affines(value: Value) -> Iterator[Affine]:
    """Yield the affine functions in a value, those in quotients and in indices of data included."""
    visited: set[int] = set()
    pending: list[Any] = [value]
    while pending:
        expression = pending.pop()
        if isinstance(expression, bool) or id(expression) in visited:
            continue
        visited.add(id(expression))
        if isinstance(expression, Affine):
            yield expression
            for term in expression.terms:
                pending += term.indices if isinstance(term, Datum) else [term.dividend]
        else:
            pending += vars(expression).values()


def axes_of(value: Value) -> set[int]:
    """Return the axes whose indices the value depends on."""
    return {axis for function in _affines(value) for axis in function.slopes}


def data_of(value: Value) -> set[Datum]:
    """Return the elements of tensors of the graph that the value depends on."""
    return {
        term for function in _affines(value) for term in function.terms if isinstance(term, Datum)
    }


def same(left: Affine, right: Affine) -> bool:
    """Return whether two numbers are proved equal. An integer never equals a float here."""
    if isinstance(left.constant, float) != isinstance(right.constant, float):
        return False
    return (
        left.slopes == right.slopes
        and left.terms == right.terms
        and always_true(left.constant == right.constant)
    )
