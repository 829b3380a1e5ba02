"""Find the sizes of a line's axes in the shapes of a call's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..axes import MANY

# A function of a call that returns the sizes of some axes.
Shape = Callable[[Any], Sequence[Any]]
MULTIPLE = re.compile(r"(\d+)\*(\w+)")


class Slice(NamedTuple):
    """The sizes from `start` to `stop` in the shape of the argument with the index `argument`."""

    argument: int
    start: int
    stop: int | None


class Sizes:
    """The sizes of axes, each read from the first tensor that has the axis."""

    def __init__(self, computed: Mapping[str, Shape]) -> None:
        """Start with `computed`, the sizes of axes that no tensor has."""
        self.sources: dict[str, Slice | Shape] = dict(computed)

    def read(self, index: int, axes: Sequence[str]) -> list[str]:
        """Record an argument as the source of its axes' sizes, except of axes that have a source;
        return the axes that were recorded."""
        count, new = len(axes), []
        many = next((i for i, axis in enumerate(axes) if axis in MANY), count)
        for i, axis in enumerate(axes):
            multiple = MULTIPLE.fullmatch(axis)
            name = multiple[2] if multiple else axis
            if name in self.sources or not (name.rstrip("'").isidentifier() or name in MANY):
                continue
            # From the front before an axis such as `*`, whose number of dimensions is open, and
            # from the back after it.
            stop = i + 1 if i < many else i + 1 - count
            sizes = Slice(index, i if i <= many else i - count, stop if i + 1 < count else None)
            self.sources[name] = divided(sizes, int(multiple[1])) if multiple else sizes
            new.append(axis)
        return new

    def shape(self, axes: Sequence[str]) -> Shape:
        """Return the function that computes the shape of a tensor with these axes."""
        sources: list[Slice | Shape] = []
        for axis in axes:
            source = self.sources[axis] if axis in self.sources else self.number(axis)
            last = sources[-1] if sources else None
            # Neighbouring axes of one argument are read by one slice, as this runs in every call.
            if (
                isinstance(source, Slice)
                and isinstance(last, Slice)
                and (last.argument, last.stop) == (source.argument, source.start)
            ):
                sources[-1] = last._replace(stop=source.stop)
            else:
                sources.append(source)
        shapes = [shape_of(s) if isinstance(s, Slice) else s for s in sources]
        if len(shapes) == 1:
            return shapes[0]
        return lambda call: tuple(size for shape in shapes for size in shape(call))

    def number(self, text: str) -> Shape:
        """Return the function that computes a size: a sum of products of numbers and axes."""
        terms = [[self.factor(factor) for factor in term.split("*")] for term in text.split("+")]
        return lambda call: (sum(math.prod(size(call)[0] for size in term) for term in terms),)

    def arguments(self, axes: Sequence[str]) -> set[int]:
        """Return the indices of the arguments from whose shapes the sizes of axes are read."""
        sources = (self.sources.get(axis) for axis in axes)
        return {source.argument for source in sources if isinstance(source, Slice)}

    def factor(self, text: str) -> Shape:
        if text.isdigit():
            return lambda call: (int(text),)
        source = self.sources[text]
        return shape_of(source) if isinstance(source, Slice) else source


def shape_of(sizes: Slice) -> Shape:
    index, dims = sizes.argument, slice(sizes.start, sizes.stop)
    if dims == slice(0, None):
        return lambda call: call[index].shape
    return lambda call: call[index].shape[dims]


def divided(sizes: Slice, divisor: int) -> Shape:
    whole = shape_of(sizes)
    return lambda call: (whole(call)[0] // divisor,)
