"""Derive the sharding rule of an op from its schema and its axes line, and register it with
DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ...axes import COMPUTED_BY_FORWARD, MANY, Line, asked_by, line_of_call
from ...library import OPS, declared, tensor_names
from ...record import Op
from ...torch_private import op_schema

Placements = list[Any]
Rule = list[tuple[Placements, Placements]]


class Role(NamedTuple):
    """A tensor of a line: its axes, and its placement if it lacks the sharded axis."""

    axes: Sequence[str]
    otherwise: Any


class TensorAxes(NamedTuple):
    """A tensor of a call: the axis of each dimension, None for one that may not be sharded, and its
    placement if it lacks the sharded axis."""

    axes: list[str | None]
    otherwise: Any

    def placement(self, sharded: str) -> Any:
        """Return the tensor's placement if the axis `sharded` is sharded."""
        return Shard(self.axes.index(sharded)) if sharded in self.axes else self.otherwise


def base_of(name: str) -> str:
    """Return the public name of an op: without its suffix `_forward` or `_backward`."""
    return name.removesuffix("_forward").removesuffix("_backward")


def line_of(op: Op, call: Any, reduction: str | None = None) -> Line:
    """Return the line of a call, or of the call with another reduction."""
    base = declared(op)
    if not base.axes:
        raise NotImplementedError(f"{op.name}: there is no sharding rule of this op")
    axes = base.axes if base.axes_of_call is None else base.axes_of_call(call, base.axes)
    return line_of_call(axes, call, reduction)


def argument_role(op: Op, line: Line, name: str) -> Role:
    """Return the role of an argument: a tensor of the line, or the gradient of a result."""
    # A gradient that the forward computed is a sum over the devices, as it left the forward.
    if op.name.endswith("_backward") and name in COMPUTED_BY_FORWARD and name in line.results:
        return Role(line.results[name].axes, Partial())
    spec = line.of(name)
    if spec is None:
        raise NotImplementedError(f"{op.name}: there is no sharding rule of the argument {name}")
    return Role(spec.axes, Replicate())


def result_names(op: Op, line: Line) -> list[str]:
    """Return the names of an op's results. Results of a backward op that have no names are the
    gradients of the forward's first tensors."""
    if not op.name.endswith("_backward"):
        return list(line.results)
    first = (f"d{name}" for name in tensor_names(declared(op)))
    return [result.name or name for result, name in zip(op.schema.returns, first, strict=False)]


def is_computed(op: Op, call: Any, i: int, name: str) -> bool:
    """Return whether a call computes its i-th result; otherwise that is None."""
    if op.name.endswith("_backward"):
        return bool(getattr(call, "output_mask", (True,) * (i + 1))[i])
    if name in COMPUTED_BY_FORWARD:
        return bool(call.gradient_mask[COMPUTED_BY_FORWARD.index(name)])
    asked = getattr(call, asked_by(name), True)
    return asked is not None and asked is not False


def dimensions(axes: Sequence[str], many: int, columns: str = "") -> list[str | None]:
    """Return the axis of each dimension, or None for one that may not be sharded. `*` and `#` stand
    for `many` dimensions. The axis `columns` may be sharded although it is an upper-case one."""
    named: list[str | None] = []
    for axis in axes:
        if axis in MANY:
            named += [f"*{i}" if axis == "*" else None for i in range(many)]
        else:
            # The axis of `2*n`, two packed halves, is n, and that of `h'`, heads of keys, is h.
            name = axis.removeprefix("2*").removesuffix("'")
            named.append(name if name.islower() or name == columns else None)
    return named


def shardable(sizes: dict[str, list[Any]], devices: int) -> list[str]:
    """Return the axes that may be sharded over `devices`. `sizes` has the different sizes that an
    axis has in the tensors of a call.

    A tensor that is shorter along an axis has one element for several neighbours of another tensor,
    as keys have one head for several heads of queries. Then every device must have whole elements
    with all their neighbours, so that the shorter sizes must be divisible by the devices.
    """
    axes = []
    for axis, axis_sizes in sizes.items():
        largest, *others = sorted(axis_sizes, reverse=True)
        if all(largest % size == 0 and size % devices == 0 for size in others):
            axes.append(axis)
    return axes


class Tensors(NamedTuple):
    """The tensors of a call; None for an argument or a result that is not a tensor."""

    arguments: list[TensorAxes | None]
    results: list[TensorAxes | None]
    # Axis -> its different sizes in the tensors: a list, because a symbolic size has no hash.
    sizes: dict[str, list[Any]]

    def placements(self, axis: str | None) -> tuple[Placements, Placements]:
        """Return the placements of results and of arguments, on one dimension of a mesh, if that
        shards `axis`, or shards nothing for None."""

        def placed(tensors: Sequence[TensorAxes | None]) -> Placements:
            return [t and (t.placement(axis) if axis else Replicate()) for t in tensors]

        return placed(self.results), placed(self.arguments)


def tensors_of(op: Op, call: Any, columns: str = "", line: Line | None = None) -> Tensors:
    """Return the tensors of a call with the axes of a line, by default the op's. The arguments of
    the call are DTensors or DTensor's specs."""
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
    for axis_sizes in sizes.values():
        if len(axis_sizes) > 1 and 1 in axis_sizes:
            axis_sizes.remove(1)

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
            spec = line.results.get(result) or line.arguments.get(like)
            if spec is None:
                # The gradient of an argument that this form of the line does not have.
                results.append(None)
                continue
            axes = dimensions(spec.axes, rows, columns)
        results.append(TensorAxes(axes, Partial()))
    return Tensors(arguments, results, sizes)


def rule(name: str, args: Sequence[Any]) -> Rule:
    """Return the sharding rule of op `name`: the placements of results and of arguments, on one
    dimension of a mesh, with which the op needs no communication.

    `args` are the arguments of a call, with a spec in place of a tensor.
    """
    op = OPS[name]
    call = op.arguments(*args)
    tensors = tensors_of(op, call)
    devices = next(value.mesh.size() for value in call if hasattr(value, "placements"))
    axes = [None, *shardable(tensors.sizes, devices)]
    return [tensors.placements(axis) for axis in axes]


def register_rules() -> None:
    """Register the rule of every op.

    A rule depends on every argument: on which tensors are None, and on strings such as the
    reduction. By default DTensor's cache of rules distinguishes calls by their tensors alone, and
    would return the placements of a sum for a mean.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, op in OPS.items():
        register_sharding(op.overload)(partial(_sharding, name))
        propagator.op_to_schema_info[op.overload] = op_schema.RuntimeSchemaInfo(
            static_argnum=0, needs_pytree=True
        )
        returns = op.schema.returns
        if len(returns) > 1 and not isinstance(returns[0].type, torch.TensorType):
            strategies = propagator.op_strategy_funcs
            strategies[op.overload] = partial(_for_each_result, strategies[op.overload])


def _sharding(name: str, *args: object) -> Rule:
    return rule(name, args)


class _NotComputed(op_schema.OpSpec):
    """The placements of a call's arguments, for a result that is None."""

    @property
    def output_spec(self) -> Any:
        return None


def _for_each_result(strategy: Callable[[Any], Any], schema: Any) -> op_schema.TupleStrategy:
    """Return a strategy for each result of an op whose first result is optional, as a gradient is:
    from a common strategy, DTensor would drop the specs of the results. As the costs are equal, all
    choose the same placements."""
    specs = strategy(schema).strategies

    def of_result(i: int) -> op_schema.OpStrategy:
        spec_class = _NotComputed if specs[0].output_specs[i] is None else op_schema.OpSpec
        return op_schema.OpStrategy(
            [
                spec_class(
                    s.output_specs[i] or s.input_specs[0], s.input_specs, s.redistribute_cost
                )
                for s in specs
            ]
        )

    return op_schema.TupleStrategy([of_result(i) for i in range(len(specs[0].output_specs))])
