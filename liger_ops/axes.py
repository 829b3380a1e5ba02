"""The line of an op: the axes of its tensors, from which follow the checks of its arguments, the
allocation of its outputs, its sharding rule and the shapes in its documentation.

A line names the axes of the arguments and of the results:

    x=* N, weight=N -> y=* N

* `*` is any number of leading axes, the rows, and `#` any number of others.
* A lower-case axis may be sharded, and so may the rows: the op treats the positions independently,
  or adds what is computed from each. With a sharded axis, a result that lacks the axis is the sum
  of what the devices compute. An upper-case axis is computed as a whole, as a norm's columns are.
* `h'` is an axis that is sharded with `h` and has a size of its own: keys may have fewer heads.
* A number is a size, and `2*N` or `H*C+H` a size that follows from axes. `1` alone stands for one
  element, in any number of dimensions.
* `loss=[*]` has these axes for the reduction "none" alone. An op without an argument `reduction` is
  a mean. No device knows the divisor of a mean, so that nothing may be sharded, unless the divisor
  is given as `num_items_in_batch`.
* `target=*: int` says which dtypes an argument may have: `int` is int32 or int64, `number` any but
  bool and complex, `any` any, an argument's name that argument's dtype, and nothing any floating
  point dtype. `predicted=*: int64` is the dtype of a result, if it is not that of the other
  results, or that of the argument of this name; `lse=*: float32+x` is float32, or float64 if x is.
* `gate=* n, up=* n -> y=* n | gate=* 2*N -> y=* N` are two forms of a call. The first form that
  names every given tensor is the call's.
* `cos=?` has axes that depend on the call. `library.define` is given a function for them.

A backward op has the line of its forward. Its arguments are arguments and results of the forward,
and gradients `d<result>`; its results are gradients `d<argument>`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

# Gradients that a forward op computes and its backward op multiplies.
COMPUTED_BY_FORWARD = ("dx", "dweight", "dbias", "dlora_x", "dlora_b")
# Axes that stand for any number of dimensions.
MANY = ("*", "#", "1")


class Entry(NamedTuple):
    """A tensor of a line."""

    axes: tuple[str, ...]
    # The axes for a reduction other than "none", if they are others.
    reduced: tuple[str, ...] | None = None
    dtype: str = ""

    @property
    def form(self) -> str:
        """The shape as messages and documentation write it: (..., 2N) for `* 2*n`."""
        axes = [_written(axis) for axis in self.axes]
        return f"({', '.join(axes)}{',' if len(axes) == 1 and self.axes[0] not in MANY else ''})"


class Line(NamedTuple):
    """The tensors of a call, by their names."""

    arguments: dict[str, Entry]
    results: dict[str, Entry]

    def of(self, name: str) -> Entry | None:
        """An argument of the op or its backward: a tensor, or the gradient of a result."""
        return (
            self.arguments.get(name)
            or self.results.get(name)
            or self.results.get(name.removeprefix("d"))
        )

    def reduced_by(self, reduction: str, has_divisor: bool) -> Line:
        """The line of a call with this reduction."""
        if all(entry.reduced is None for entry in self.results.values()) or reduction == "none":
            return self
        whole = reduction != "sum" and not has_divisor

        def changed(entry: Entry) -> Entry:
            axes = entry.axes if entry.reduced is None else entry.reduced
            if whole:
                axes = tuple("#" if axis == "*" else axis.upper() for axis in axes)
            return entry._replace(axes=axes, reduced=None)

        sides = ({name: changed(entry) for name, entry in side.items()} for side in self)
        return Line(*sides)


@cache
def lines(text: str) -> tuple[Line, ...]:
    """The forms of a line."""
    return tuple(Line(*map(_entries, form.split("->"))) for form in text.split("|"))


def line_of_call(axes: str, call: Any, reduction: str | None = None) -> Line:
    """The line of a call, whose arguments are tensors, or stand for tensors; of the call with
    another reduction, if one is given."""
    forms = lines(axes)
    line = next(form for form in forms if not any(_is_given(call, n) for n in unnamed(form, forms)))
    reduction = reduction or str(getattr(call, "reduction", "mean"))
    return line.reduced_by(reduction, _is_given(call, "num_items_in_batch"))


def unnamed(line: Line, forms: tuple[Line, ...]) -> list[str]:
    """The arguments that other forms have and this one lacks."""
    return [name for form in forms for name in form.arguments if name not in line.arguments]


def asked_by(result: str) -> str:
    """The argument that asks for an optional result."""
    return "target" if result == "cross_entropy" else f"return_{result.removesuffix('_tokens')}"


def _is_given(call: Any, name: str) -> bool:
    return getattr(call, name, None) is not None


def _entries(side: str) -> dict[str, Entry]:
    return dict(_entry(part) for part in side.split(","))


def _entry(text: str) -> tuple[str, Entry]:
    name, axes, dtype = re.fullmatch(r"\s*(\w+)=([^:]*?)\s*(?::\s*([\w+]+)\s*)?", text).groups()  # type: ignore[union-attr]
    outside = re.sub(r"\[.*\]", "", axes)
    reduced = None if outside == axes else tuple(outside.split())
    return name, Entry(tuple(axes.strip("[]").split()), reduced, dtype or "")


def _written(axis: str) -> str:
    if axis in ("*", "#"):
        return {"*": "...", "#": "*spatial"}[axis]
    named = re.sub(r"[A-Za-z]\w*", lambda m: m[0].upper() if len(m[0]) == 1 else m[0].lower(), axis)
    multiple = re.fullmatch(r"(\d+)\*(\w+)", named)
    return "".join(multiple.groups()) if multiple else re.sub(r"[*+]", r" \g<0> ", named)
