"""Norms and softmax of rows whose columns are sharded: a device computes its columns, and the
devices sum statistics of the rows. No activation moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..ops.rows import Parts, parts
from ..record import Op
from .axes import SHARDED_COLUMNS
from .collectives import reduced
from .rules import base_of, shardable, tensors_of

COLUMNS = "N"
# The tensor whose rows have the statistics: x, the sum s of the op that adds, or the result y from
# which a softmax's gradient is computed.
NORMALISED = ("x", "s", "y")


def computed_by_columns(op: Op, args: tuple[Any, ...]) -> Any:
    """The results of a call whose columns are sharded, or NotImplemented for any other."""
    call = op.arguments(*args)
    placements = _placements(op, call)
    if placements is None:
        return NotImplemented
    of_results, of_arguments, sharding, columns, mesh = placements
    # The checks of the whole shapes, and the whole results' shapes and strides.
    whole = op.check_and_allocate(*(_without_data(value) for value in call))

    def over_devices(operation: str) -> Callable[[Tensor], Tensor]:
        def reduce(value: Tensor) -> Tensor:
            for i in sharding:
                value = reduced(value, operation, (mesh, i))
            return value

        return reduce

    with torch.no_grad():
        own = [
            _own(value, list(given)) if isinstance(value, DTensor) else value
            for value, given in zip(call, of_arguments, strict=True)
        ]
        with parts(Parts(columns, over_devices("sum"), over_devices("max"))):
            found = op.definition(*own)
        results = [
            None if value is None else _whole(value, mesh, list(given), like)
            for value, like, given in zip(_tuple(found), _tuple(whole), of_results, strict=True)
        ]
    return tuple(results) if isinstance(found, tuple) else results[0]


class Placed(NamedTuple):
    """A call whose columns are sharded: the placements of each result and argument, the dimensions
    of the mesh that share columns, and how many columns they have."""

    results: list[tuple[Any, ...]]
    arguments: list[tuple[Any, ...]]
    sharding: list[int]
    columns: int
    mesh: DeviceMesh


def _placements(op: Op, call: Any) -> Placed | None:
    if base_of(op.name) not in SHARDED_COLUMNS:
        return None
    name = next(name for name in NORMALISED if name in call._fields)
    x = getattr(call, name)
    if any(isinstance(value, Tensor) and not isinstance(value, DTensor) for value in call):
        return None
    sharding = [i for i, placement in enumerate(x.placements) if placement == Shard(x.dim() - 1)]
    if not sharding or any(type(p) not in (Shard, Replicate) for p in x.placements):
        return None
    mesh, columns = x.device_mesh, x.shape[-1]
    if getattr(call, "group_size", None) not in (None, columns) or mesh.get_coordinate() is None:
        return None
    tensors = tensors_of(op, call, COLUMNS)
    axes = tensors.arguments[call._fields.index(name)].axes
    found = []
    for i, placement in enumerate(x.placements):
        axis = axes[placement.dim] if isinstance(placement, Shard) else None
        if isinstance(placement, Shard) and axis not in shardable(tensors.sizes, mesh.size(i)):
            return None
        found.append(tensors.placements(axis))
    results, arguments = (list(zip(*kind, strict=True)) for kind in zip(*found, strict=True))
    return Placed(results, arguments, sharding, columns, mesh)


def _own(tensor: DTensor, placements: list[Any]) -> Tensor:
    """The device's part of a tensor with these placements."""
    if list(tensor.placements) != placements:
        # PyTorch 2.11 cannot redistribute a tensor that requires a gradient below autograd.
        detached: Any = tensor.detach()
        tensor = detached.redistribute(placements=placements)
    return tensor.to_local()


def _whole(own: Tensor, mesh: DeviceMesh, placements: list[Any], like: Tensor) -> DTensor:
    """The DTensor of the devices' parts, with a whole tensor's shape and strides."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def _without_data(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
