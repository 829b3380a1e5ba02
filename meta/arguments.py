"""Checks of a call's arguments, compiled from the axes line and the options of its op, and the
sizes of the line's axes in the shapes of the arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library
from ..accepted import Accepted, one_of
from ..axes import COMPUTED_BY_FORWARD, MANY, Line, TensorSpec
from ..ops.tensors import equal

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


Check = Callable[[Any], None]

# The text behind an argument's colon -> the condition on its dtype, and its name in messages.
DTYPES: dict[str, tuple[Callable[[Tensor], bool], str]] = {
    "": (Tensor.is_floating_point, "a floating point tensor"),
    "int": (lambda tensor: tensor.dtype in (torch.int64, torch.int32), "int64 or int32"),
    "int64": (lambda tensor: tensor.dtype is torch.int64, "int64"),
    "int32": (lambda tensor: tensor.dtype is torch.int32, "int32"),
    "any": (lambda tensor: True, "a tensor"),
    "bool": (lambda x: x.dtype is torch.bool, "bool"),
    "host": (lambda tensor: tensor.dtype is torch.int64, "int64"),
    "number": (lambda x: x.dtype is not torch.bool and not x.is_complex(), "a number"),
}


class Names:
    """The arguments of an op with the axes that one form of its line gives to them."""

    def __init__(self, op: library.Op, line: Line, unnamed: Sequence[str]) -> None:
        self.op, self.line = op.name.removesuffix("_forward"), line
        self.index = {argument.name: i for i, argument in enumerate(op.schema.arguments)}
        self.required = {a.name for a in op.schema.arguments if str(a.type) == "Tensor"}
        tensors = [name for name in library.tensor_names(op) if name not in unnamed]
        # The size of an axis is read from the first tensor that has it, so that messages blame the
        # later tensors. The order is: required inputs, required results, other inputs, gradients.
        self.tensors = {name: self._spec(name) for name in sorted(tensors, key=self._rank)}
        self.first = next(iter(self.tensors))
        self.without = f" without {', '.join(unnamed)}, which it then holds"

    def _rank(self, name: str) -> int:
        if name in self.line.arguments:
            return 0 if name in self.required else 2
        return 1 if name in self.line.results and name in self.required else 3

    def _spec(self, name: str) -> TensorSpec:
        spec = self.line.of(name)
        assert spec is not None, f"{self.op}: the line does not name the argument {name}"
        return spec

    def axes_of_argument(self, name: str) -> tuple[str, ...]:
        """Return the axes of an argument of the forward, and () for other arguments."""
        return self.tensors[name].axes if name in self.line.arguments else ()

    def like(self, axes: tuple[str, ...]) -> str | None:
        """Return the name of the first tensor with these axes."""
        return next((name for name, spec in self.tensors.items() if spec.axes == axes), None)

    def shape(self, spec: TensorSpec, sizes: Sizes) -> Shape:
        """Return the function that computes a tensor's shape from a call, with its reduction."""
        shape = sizes.shape(spec.axes)
        if spec.reduced is None:
            return shape
        reduced = sizes.shape(spec.reduced)
        if "reduction" not in self.index:
            return reduced
        index = self.index["reduction"]
        return lambda call: (shape if call[index] == "none" else reduced)(call)

    def meaning(self, name: str, axes: tuple[str, ...]) -> str:
        """Describe the shape of an argument for messages: as that of a tensor before it, if one has
        it, or "x's rows" and the like, or by the axes."""
        before = list(self.tensors)[: list(self.tensors).index(name)]
        others = [(other, self.tensors[other].axes) for other in before]
        sharing = (other for other, other_axes in others if set(axes) & set(other_axes))
        first = next(sharing, None)
        with_axes = f" for {first} of {self.tensors[first].shape_text}" if first else ""
        words = f"{TensorSpec(axes).shape_text}{with_axes}" if axes else "a number"
        is_one_axis = len(axes) == 1 and axes[0] not in MANY
        # Reversed, because the first of the others with a description is to be named.
        for other, other_axes in reversed(others):
            if other_axes[:1] == axes and len(other_axes) == 2 and is_one_axis:
                words = f"{other}'s rows"
            elif other_axes[-1:] == axes and "*" in other_axes:
                words = f"{other}'s last dimension"
            elif not is_one_axis and other_axes[:-1] in (axes, axes[:-1]) and other_axes[:-1]:
                words = f"{other} but for its last dimension"
        # A result of the forward, or the gradient of one, in the call of a backward op.
        if not {name, name[1:]} & self.line.arguments.keys() or name in COMPUTED_BY_FORWARD:
            words = f"the forward's {name if name in self.line.results else name[1:]}"
        # A tensor with all the same axes is the best description.
        same = [other for other, known in others if known == axes and axes and not is_one_axis]
        return next(iter(same), words)


def arguments_check(names: Names, sizes: Sizes, excepted: Sequence[str]) -> Check:
    """Compile the check of the tensors' dtypes, devices and shapes. A function registered under
    `@also` checks the shapes of the tensors named in `excepted`."""
    op, x, first = names.op, names.first, names.index[names.first]
    optional = {i for name, i in names.index.items() if name not in names.required}
    rows = []
    for name, spec in names.tensors.items():
        index, dtype = names.index[name], spec.dtype
        is_accepted, accepted = DTYPES.get(dtype, DTYPES[""])
        fits: Callable[[Tensor], bool] | None = None
        shape: Shape | None = None
        form, meaning = "", ""
        if spec.axes == ("1",):
            fits, form = _has_one_element, "have one element"
        elif name not in excepted:
            # Axes that no tensor before has define their sizes here; only their number can be
            # wrong. The sizes of other axes are compared.
            new = sizes.read(index, spec.axes)
            if new and spec.axes not in (("*",), ("#",)):
                fits, form = _dimensions(spec, new, names.without)
            if len(new) < len(spec.axes) or not spec.axes:
                sources = sizes.arguments(spec.axes) & optional - {index}
                shape = _if_given(names.shape(spec, sizes), index, sources)
                meaning = names.meaning(name, spec.axes)
        # The argument whose dtype this one has, or in a backward op the gradient of that result.
        same = names.index.get(dtype, names.index.get(f"d{dtype}"))
        rows.append((index, name, is_accepted, accepted, same, dtype, fits, form, shape, meaning))

    def check(call: Any) -> None:
        device = call[first].device
        for i, name, is_accepted, accepted, same, other, fits, form, shape, meaning in rows:
            tensor = call[i]
            if tensor is None:
                continue
            if not is_accepted(tensor):
                raise TypeError(f"{op}: {name} must be {accepted}, got {tensor.dtype}")
            if same is not None and tensor.dtype != call[same].dtype:
                expected = f"{other}'s dtype, {call[same].dtype}"
                raise TypeError(f"{op}: {name} must have {expected}, got {tensor.dtype}")
            if other == "host":
                if tensor.device.type != "cpu":
                    raise ValueError(f"{op}: {name} must be on the CPU, got {tensor.device}")
            elif tensor.device != device:
                raise ValueError(
                    f"{op}: {name} must be on {x}'s device, {device}, got {tensor.device}"
                )
            if fits is not None and not fits(tensor):
                raise ValueError(f"{op}: {name} must {form}, got shape {tuple(tensor.shape)}")
            if shape is not None and not equal(tensor.shape, shape(call), f"{op}: {name}"):
                raise ValueError(
                    f"{op}: {name} must have the shape of {meaning}, {tuple(shape(call))},"
                    f" got {tuple(tensor.shape)}"
                )

    return check


def _if_given(shape: Shape, index: int, sources: Collection[int]) -> Shape:
    """Accept any shape of the argument `index` in a call where one of `sources`, the optional
    arguments that the expected shape is read from, is None."""
    if not sources:
        return shape
    return lambda call: call[index].shape if any(call[i] is None for i in sources) else shape(call)


def _has_one_element(tensor: Tensor) -> bool:
    return tensor.numel() == 1


def _dimensions(
    spec: TensorSpec, new: Sequence[str], without: str
) -> tuple[Callable[[Tensor], bool], str]:
    """Return a function that checks the number of a tensor's dimensions, and that a size such as
    `2*N` is divisible if N is among the `new` axes; and the requirement in words."""
    axes = spec.axes
    least = sum(axis not in MANY for axis in axes)
    most = least if least == len(axes) else float("inf")
    multiples = [(axes.index(axis) - len(axes), MULTIPLE.fullmatch(axis)) for axis in new]
    divisors = [(dim, int(multiple[1])) for dim, multiple in multiples if multiple]

    def fits(tensor: Tensor) -> bool:
        if not least <= tensor.dim() <= most:
            return False
        return not divisors or all(tensor.shape[dim] % divisor == 0 for dim, divisor in divisors)

    return fits, f"be {spec.shape_text}{without if divisors else ''}"


def options_check(op: library.Op, title: str) -> Check:
    """Compile the check of the values of options. Messages name the op `title`."""
    arguments = op.schema.arguments
    options = library.declared(op).options
    accepted_by = {
        name: value if isinstance(value, Accepted) else one_of(value)
        for name, value in options.items()
    }
    rows = [(i, a.name, accepted_by[a.name]) for i, a in enumerate(arguments) if a.name in options]

    def check(call: Any) -> None:
        for i, name, accepted in rows:
            value = call[i]
            if value is not None and not accepted.holds(value):
                raise ValueError(f"{title}: {name} must be {accepted.text}, got {value!r}")

    return check
