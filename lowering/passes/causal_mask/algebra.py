"""Tensors as functions of their indices, and proofs about such functions.

Axes are counted from the right, -1 being the last, because broadcasting keeps that count. An
integer tensor is `Affine` in its indices, a boolean tensor is a tree of comparisons (`Condition`),
and a tensor whose numbers depend on a condition is a `Choice`. Sizes may be symbolic: a proof holds
for every size that the graph is compiled for, and adds no guard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Size = int | torch.SymInt
LEAVES = 16


class Unknown(Exception):
    """A tensor cannot be evaluated as a function of its indices; the text says why."""


@dataclass(frozen=True, eq=False)
class Affine:
    """constant + sum(slopes[axis] * index[axis] for each axis)."""

    constant: Size | float
    slopes: Mapping[int, int]

    def __add__(self, other: Affine) -> Affine:
        axes = {**self.slopes, **other.slopes}
        slopes = {axis: self.slopes.get(axis, 0) + other.slopes.get(axis, 0) for axis in axes}
        return affine(self.constant + other.constant, slopes)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def times(self, factor: Size | float) -> Affine:
        if not self.slopes:
            return affine(self.constant * factor)
        if not isinstance(factor, int):
            raise Unknown("it multiplies an index by a number that is not a constant integer")
        return affine(
            self.constant * factor, {axis: slope * factor for axis, slope in self.slopes.items()}
        )


def affine(constant: Size | float, slopes: Mapping[int, int] | None = None) -> Affine:
    return Affine(constant, {axis: slope for axis, slope in (slopes or {}).items() if slope})


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
        if left.slopes or right.slopes or any(isinstance(side, torch.SymInt) for side in sides):
            raise Unknown("it compares an index with a floating-point number")
        return bool(left.constant >= right.constant)
    difference = left - right
    if not difference.slopes and isinstance(difference.constant, int):
        return difference.constant >= 0
    return NonNegative(difference)


def equal(left: Affine, right: Affine) -> Condition:
    return both(at_least(left, right), at_least(right, left))


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

    def rebuilt(part: Any) -> Any:
        if isinstance(part, Affine):
            total = affine(part.constant)
            for axis, slope in part.slopes.items():
                total = total + places.get(axis, index(axis)).times(slope)
            return total
        if isinstance(part, NonNegative):
            return at_least(replaced(part.value), affine(0))
        if isinstance(part, Not):
            return negation(replaced(part.of))
        if isinstance(part, Both):
            return both(replaced(part.left), replaced(part.right))
        return choose(replaced(part.condition), replaced(part.yes), replaced(part.no))

    return replaced(value)


def axes_of(value: Value) -> set[int]:
    """The axes whose indices the value depends on."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting: list[Any] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Affine):
            found |= part.slopes.keys()
        else:
            waiting += vars(part).values()
    return found


@dataclass(frozen=True)
class Frame:
    """A region's indices, written as affine functions of variables with ranges.

    The range of a variable is its lowest value and a tuple of upper bounds, all of which hold.
    """

    indices: Mapping[int, Affine]
    ranges: Mapping[int, tuple[int, tuple[Size, ...]]]

    def proves_nonnegative(self, value: Affine) -> bool:
        value = at(value, self.indices)
        least: list[Any] = [value.constant]
        for variable, slope in value.slopes.items():
            low, highs = self.ranges[variable]
            ends = (low,) if slope > 0 else highs
            least = [constant + slope * end for constant in least for end in ends]
        return any(known(constant >= 0) for constant in least)


@dataclass(frozen=True)
class Region:
    """A set of indices, described by one frame or several. A proof in any frame is valid."""

    frames: Sequence[Frame]

    def decide(self, condition: Condition) -> bool | None:
        """True if the condition holds in the whole region, False if nowhere, None if unknown."""
        done: dict[int, bool | None] = {}

        def decided(part: Condition) -> bool | None:
            if isinstance(part, bool):
                return part
            if id(part) not in done:
                done[id(part)] = found(part)
            return done[id(part)]

        def found(part: NonNegative | Not | Both) -> bool | None:
            if isinstance(part, NonNegative):
                if self.proves_nonnegative(part.value):
                    return True
                below = affine(-1) - part.value
                return False if self.proves_nonnegative(below) else None
            if isinstance(part, Not):
                inner = decided(part.of)
                return None if inner is None else not inner
            sides = (decided(part.left), decided(part.right))
            if False in sides:
                return False
            return None if None in sides else True

        return decided(condition)

    def proves_nonnegative(self, value: Affine) -> bool:
        return any(frame.proves_nonnegative(value) for frame in self.frames)

    def simplified(self, value: Number) -> Number:
        """The value without choices that are decided in the whole region."""
        if not isinstance(value, Choice):
            return value
        decision = self.decide(value.condition)
        if decision is not None:
            return self.simplified(value.yes if decision else value.no)
        yes, no = self.simplified(value.yes), self.simplified(value.no)
        if isinstance(yes, Affine) and isinstance(no, Affine) and _same(yes, no):
            return yes
        return Choice(value.condition, yes, no)


def _same(left: Affine, right: Affine) -> bool:
    if isinstance(left.constant, float) != isinstance(right.constant, float):
        return False
    return left.slopes == right.slopes and known(left.constant == right.constant)


def everywhere(shape: Sequence[Size]) -> Region:
    """All indices of a tensor of this shape."""
    axes = range(-len(shape), 0)
    return Region([Frame({}, {axis: (0, (shape[axis] - 1,)) for axis in axes})])
