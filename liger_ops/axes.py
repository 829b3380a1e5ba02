"""The axes line of an op, which names the axes of its tensors. From it follow the checks of the
op's arguments, the allocation of its outputs, its sharding rule and the shapes in its
documentation.

A line names the axes of each tensor argument and of each result:

    x=* N, weight=N -> y=* N

* `*` is any number of leading axes, the rows; `#` is any number of other axes.
* A lower-case axis may be sharded, and so may the rows: the op computes each position by itself, or
  sums over the positions. If a sharded axis is missing from a result, the result is the sum of the
  devices' results. An upper-case axis must be whole on every device, as the columns of a norm.
* `h'` is an axis that is sharded with `h` and has a size of its own: keys may have fewer heads than
  queries.
* A number is a size, and `2*N` or `H*C+H` is a size computed from those of axes. `1` as the only
  axis stands for one element, in any number of dimensions.
* `loss=[*]` has the axes in brackets for the reduction "none" alone. An op without an argument
  `reduction` computes a mean. No device knows the divisor of a mean over all devices; thus no axis
  may be sharded, unless the divisor is given as `num_items_in_batch`.
* `target=*: int` restricts the dtype of an argument: `int` is int32 or int64, `bool` is bool,
  `number` is any dtype but bool and complex, and `any` is any dtype. `host` is int64 in the memory
  of the CPU, whatever the device of the other arguments. An argument's name is the dtype of that
  argument. Without a colon, an argument has any floating point dtype.
* `predicted=*: int64` is the dtype of a result, if it differs from that of the other results. An
  argument's name is the dtype of that argument; `lse=*: float32+x` is float32, or float64 if x is.
* `gate=* n, up=* n -> y=* n | gate=* 2*N -> y=* N` are two forms. A call has the first form that
  names every tensor of the call.
* `cos=?` has axes that depend on the call, and are computed by a function given to
  `library.define`.

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


class TensorSpec(NamedTuple):
    """A tensor of a line."""

    axes: tuple[str, ...]
    # The axes for a reduction other than "none", where these differ; None where they do not.
    reduced: tuple[str, ...] | None = None
    # The text behind the colon.
    dtype: str = ""

    @property
    def shape_text(self) -> str:
        """The shape as messages and documentation write it: (..., 2N) for `* 2*n`."""
        axes = [_axis_text(axis) for axis in self.axes]
        return f"({', '.join(axes)}{',' if len(axes) == 1 and self.axes[0] not in MANY else ''})"


class Line(NamedTuple):
    """One form of an op's axes line: tensors by their names."""

    arguments: dict[str, TensorSpec]
    results: dict[str, TensorSpec]

    def of(self, name: str) -> TensorSpec | None:
        """Return the axes of an argument of the op or of its backward: an argument or a result of
        the op, or the gradient of a result."""
        return (
            self.arguments.get(name)
            or self.results.get(name)
            or self.results.get(name.removeprefix("d"))
        )

    def reduced_by(self, reduction: str, has_divisor: bool) -> Line:
        """Return the line of a call with this reduction; `has_divisor` says whether the divisor of
        a mean is an argument of the call."""
        if all(spec.reduced is None for spec in self.results.values()) or reduction == "none":
            return self
        # A mean whose divisor no device knows: no axis may be sharded.
        is_unsharded = reduction != "sum" and not has_divisor

        def reduced(spec: TensorSpec) -> TensorSpec:
            axes = spec.axes if spec.reduced is None else spec.reduced
            if is_unsharded:
                axes = tuple("#" if axis == "*" else axis.upper() for axis in axes)
            return spec._replace(axes=axes, reduced=None)

        sides = ({name: reduced(spec) for name, spec in side.items()} for side in self)
        return Line(*sides)


@cache
def lines(text: str) -> tuple[Line, ...]:
    """Parse the text of a line into its forms."""
    return tuple(Line(*map(_parse_side, form.split("->"))) for form in text.split("|"))


def line_of_call(axes: str, call: Any, reduction: str | None = None) -> Line:
    """Return the line of a call. Its arguments are tensors, or any values in place of tensors, as
    only None is asked for. `reduction` replaces the call's own, if given."""
    forms = lines(axes)
    line = next(form for form in forms if not any(_is_given(call, n) for n in unnamed(form, forms)))
    reduction = reduction or str(getattr(call, "reduction", "mean"))
    return line.reduced_by(reduction, _is_given(call, "num_items_in_batch"))


def unnamed(line: Line, forms: tuple[Line, ...]) -> list[str]:
    """Return the arguments that other forms of the line name and this one does not."""
    return [name for form in forms for name in form.arguments if name not in line.arguments]


def asked_by(result: str) -> str:
    """Return the name of the argument that asks for an optional result."""
    return "target" if result == "cross_entropy" else f"return_{result.removesuffix('_tokens')}"


def _is_given(call: Any, name: str) -> bool:
    return getattr(call, name, None) is not None


def _parse_side(side: str) -> dict[str, TensorSpec]:
    return dict(_parse_tensor(text) for text in side.split(","))


def _parse_tensor(text: str) -> tuple[str, TensorSpec]:
    name, axes, dtype = re.fullmatch(r"\s*(\w+)=([^:]*?)\s*(?::\s*([\w+]+)\s*)?", text).groups()  # type: ignore[union-attr]
    # The axes outside of brackets remain with a reduction.
    outside = re.sub(r"\[.*\]", "", axes)
    reduced = None if outside == axes else tuple(outside.split())
    return name, TensorSpec(tuple(axes.strip("[]").split()), reduced, dtype or "")


def _axis_text(axis: str) -> str:
    if axis in ("*", "#"):
        return {"*": "...", "#": "*spatial"}[axis]
    named = re.sub(r"[A-Za-z]\w*", lambda m: m[0].upper() if len(m[0]) == 1 else m[0].lower(), axis)
    multiple = re.fullmatch(r"(\d+)\*(\w+)", named)
    return "".join(multiple.groups()) if multiple else re.sub(r"[*+]", r" \g<0> ", named)
