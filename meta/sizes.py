"""Where the sizes of a line's axes are in a call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..axes import MANY

# The sizes of a call's axes.
Shape = Callable[[Any], Sequence[Any]]
MULTIPLE = re.compile(r"(\d+)\*(\w+)")


class Slice(NamedTuple):
    """Neighbouring sizes in the shape of an argument, the one with this index."""

    argument: int
    start: int
    stop: int | None


class Sizes:
    """The sizes of axes, each read from the first tensor that has the axis."""

    def __init__(self, found: Mapping[str, Shape]) -> None:
        """`found` are the sizes that no tensor has."""
        self.found: dict[str, Slice | Shape] = dict(found)

    def read(self, index: int, axes: Sequence[str]) -> list[str]:
        """Read the sizes of an argument's axes that are not known yet, and return these axes."""
        count, new = len(axes), []
        many = next((i for i, axis in enumerate(axes) if axis in MANY), count)
        for i, axis in enumerate(axes):
            multiple = MULTIPLE.fullmatch(axis)
            name = multiple[2] if multiple else axis
            if name in self.found or not (name.rstrip("'").isidentifier() or name in MANY):
                continue
            stop = i + 1 if i < many else i + 1 - count
            sizes = Slice(index, i if i <= many else i - count, stop if i + 1 < count else None)
            self.found[name] = divided(sizes, int(multiple[1])) if multiple else sizes
            new.append(axis)
        return new

    def shape(self, axes: Sequence[str]) -> Shape:
        parts: list[Slice | Shape] = []
        for axis in axes:
            part = self.found[axis] if axis in self.found else self.number(axis)
            last = parts[-1] if parts else None
            if (
                isinstance(part, Slice)
                and isinstance(last, Slice)
                and (last.argument, last.stop) == (part.argument, part.start)
            ):
                parts[-1] = last._replace(stop=part.stop)
            else:
                parts.append(part)
        shapes = [shape_of(part) if isinstance(part, Slice) else part for part in parts]
        if len(shapes) == 1:
            return shapes[0]
        return lambda call: tuple(size for shape in shapes for size in shape(call))

    def number(self, text: str) -> Shape:
        """A number, or a sum of products of numbers and axes."""
        terms = [[self.factor(factor) for factor in term.split("*")] for term in text.split("+")]
        return lambda call: (sum(math.prod(size(call)[0] for size in term) for term in terms),)

    def arguments(self, axes: Sequence[str]) -> set[int]:
        """The arguments whose shapes have the sizes of axes."""
        found = (self.found.get(axis) for axis in axes)
        return {part.argument for part in found if isinstance(part, Slice)}

    def factor(self, text: str) -> Shape:
        if text.isdigit():
            return lambda call: (int(text),)
        found = self.found[text]
        return shape_of(found) if isinstance(found, Slice) else found


def shape_of(sizes: Slice) -> Shape:
    index, part = sizes.argument, slice(sizes.start, sizes.stop)
    if part == slice(0, None):
        return lambda call: call[index].shape
    return lambda call: call[index].shape[part]


def divided(sizes: Slice, divisor: int) -> Shape:
    whole = shape_of(sizes)
    return lambda call: (whole(call)[0] // divisor,)
