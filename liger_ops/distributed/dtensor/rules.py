"""The sharding rule of an op, derived from its schema and the names of its tensors' axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard

from ...axes import COMPUTED_BY_FORWARD, MANY, Line, asked_by, line_of_call
from ...library import OPS, declared, tensor_names
from ...record import Op

Placements = list[Any]
Rule = list[tuple[Placements, Placements]]


class Role(NamedTuple):
    """A tensor of a call: its axes, and its placement where a sharded axis is not among them."""

    axes: Sequence[str]
    otherwise: Any


class TensorAxes(NamedTuple):
    """A tensor of a call: the axis of each dimension, None for one that is not sharded."""

    axes: list[str | None]
    otherwise: Any

    def placement(self, sharded: str) -> Any:
        return Shard(self.axes.index(sharded)) if sharded in self.axes else self.otherwise


def base_of(name: str) -> str:
    """The public name of an op: without its suffix `_forward` or `_backward`."""
    return name.removesuffix("_forward").removesuffix("_backward")


def line_of(op: Op, call: Any, reduction: str | None = None) -> Line:
    """The line of a call, or of the call with another reduction."""
    known = declared(op)
    if not known.axes:
        raise NotImplementedError(f"{op.name}: there is no sharding rule of this op")
    axes = known.axes if known.axes_of_call is None else known.axes_of_call(call, known.axes)
    return line_of_call(axes, call, reduction)


def argument_role(op: Op, line: Line, name: str) -> Role:
    """An argument: a tensor of the line, or the gradient of a result."""
    if op.name.endswith("_backward") and name in COMPUTED_BY_FORWARD and name in line.results:
        return Role(line.results[name].axes, Partial())
    entry = line.of(name)
    if entry is None:
        raise NotImplementedError(f"{op.name}: there is no sharding rule of the argument {name}")
    return Role(entry.axes, Replicate())


def result_names(op: Op, line: Line) -> list[str]:
    """The names of the results; those of a backward op without names are the gradients of the
    first tensors of the forward."""
    if not op.name.endswith("_backward"):
        return list(line.results)
    first = (f"d{name}" for name in tensor_names(declared(op)))
    return [result.name or name for result, name in zip(op.schema.returns, first, strict=False)]


def is_computed(op: Op, call: Any, i: int, name: str) -> bool:
    """Whether a call has the i-th result, or None in its place."""
    if op.name.endswith("_backward"):
        return bool(getattr(call, "output_mask", (True,) * (i + 1))[i])
    if name in COMPUTED_BY_FORWARD:
        return bool(call.gradient_mask[COMPUTED_BY_FORWARD.index(name)])
    asked = getattr(call, asked_by(name), True)
    return asked is not None and asked is not False


def dimensions(axes: Sequence[str], many: int, columns: str = "") -> list[str | None]:
    """The axis of each dimension, where `*` and `#` are `many` dimensions. The axis `columns` may
    be sharded although it is an upper-case one."""
    named: list[str | None] = []
    for axis in axes:
        if axis in MANY:
            named += [f"*{i}" if axis == "*" else None for i in range(many)]
        else:
            # The columns of two packed halves are columns, and heads of keys are heads.
            name = axis.removeprefix("2*").removesuffix("'")
            named.append(name if name.islower() or name == columns else None)
    return named


def shardable(sizes: dict[str, list[Any]], devices: int) -> list[str]:
    """The axes that may be sharded, of those with these sizes in the tensors of a call.

    A tensor with fewer elements than others has one for so many neighbours, as keys have a head for
    several heads of queries: then every device must have the neighbours of whole elements.
    """
    found = []
    for axis, found_sizes in sizes.items():
        largest, *others = sorted(found_sizes, reverse=True)
        if all(largest % size == 0 and size % devices == 0 for size in others):
            found.append(axis)
    return found


class Tensors(NamedTuple):
    """The tensors of a call; None for an argument or a result that is none."""

    arguments: list[TensorAxes | None]
    results: list[TensorAxes | None]
    # Axis -> its different sizes in the tensors: a list, because a symbolic size has no hash.
    sizes: dict[str, list[Any]]

    def placements(self, axis: str | None) -> tuple[Placements, Placements]:
        """The placements of results and of arguments, on one dimension of a mesh, that shard an
        axis, or nothing."""

        def placed(tensors: Sequence[TensorAxes | None]) -> Placements:
            return [t and (t.placement(axis) if axis else Replicate()) for t in tensors]

        return placed(self.results), placed(self.arguments)


def tensors_of(op: Op, call: Any, columns: str = "", line: Line | None = None) -> Tensors:
    """The tensors of a call, whose arguments are tensors or specs of DTensor, with the axes of a
    line, by default the op's."""
    line = line_of(op, call) if line is None else line
    roles = {
        argument.name: (argument_role(op, line, argument.name), value)
        for argument, value in zip(op.schema.arguments, call, strict=True)
        if hasattr(value, "placements")
    }
    many = {name: len(value.shape) - len(role.axes) + 1 for name, (role, value) in roles.items()}
    rows = max((many[name] for name, (role, _) in roles.items() if "*" in role.axes), default=0)
    named = {name: dimensions(role.axes, many[name], columns) for name, (role, _) in roles.items()}

    # A size of 1 among others is broadcast: the tensor lacks the axis.
    sizes: dict[str, list[Any]] = {}
    for name, axes in named.items():
        for axis, size in zip(axes, roles[name][1].shape, strict=True):
            if axis is not None and size not in sizes.setdefault(axis, []):
                sizes[axis].append(size)
    for name, axes in named.items():
        shape = roles[name][1].shape
        named[name] = [
            None if axis is None or (size == 1 and len(sizes[axis]) > 1) else axis
            for axis, size in zip(axes, shape, strict=True)
        ]
    for found in sizes.values():
        if len(found) > 1 and 1 in found:
            found.remove(1)

    arguments = [
        TensorAxes(named[argument.name], roles[argument.name][0].otherwise)
        if argument.name in roles
        else None
        for argument in op.schema.arguments
    ]
    results: list[TensorAxes | None] = []
    for i, result in enumerate(result_names(op, line)):
        if not is_computed(op, call, i, result):
            results.append(None)
            continue
        like = result if op.name.endswith("_backward") and result in line.results else ""
        like = like or result.removeprefix("d")
        if op.name.endswith("_backward") and like in named:
            axes = named[like]
        else:
            entry = line.results.get(result) or line.arguments.get(like)
            if entry is None:
                # The gradient of an argument that the form of the call lacks.
                results.append(None)
                continue
            axes = dimensions(entry.axes, rows, columns)
        results.append(TensorAxes(axes, Partial()))
    return Tensors(arguments, results, sizes)


def rule(name: str, args: Sequence[Any]) -> Rule:
    """The placements of results and of arguments, on one dimension of a mesh, that op `name` keeps.

    `args` are the arguments of a call, with a spec in place of a tensor.
    """
    op = OPS[name]
    call = op.arguments(*args)
    tensors = tensors_of(op, call)
    devices = next(value.mesh.size() for value in call if hasattr(value, "placements"))
    axes = [None, *shardable(tensors.sizes, devices)]
    return [tensors.placements(axis) for axis in axes]
