"""Norms, softmax and packed gates whose columns are sharded: a device computes its columns, and the
devices sum statistics of the rows where they share any. No activation moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..ops.rows import Parts, parts
from ..record import Op
from .axes import GATED_COLUMNS, GROUPED_COLUMNS, SHARDED_COLUMNS
from .collectives import reduced
from .column_groups import Groups
from .rules import base_of, shardable, tensors_of

COLUMNS = "N"
# The tensor whose placements say which columns a device has: x, the sum s of the op that adds, the
# result y from which a softmax's gradient is computed, or the packed gate.
NAMES = ("x", "s", "y", "gate")
# The halves of a packed gate: a device has its columns of the gate, then those of the up.
HALVES = 2

# Computes a device's results from its arguments.
Compute = Callable[[list[Any]], Any]


def computed_by_columns(op: Op, call: Any) -> Any:
    """The results of a call whose columns are sharded, or NotImplemented for any other."""
    x = _sharded(op, call)
    if x is None:
        return NotImplemented
    try:
        # The checks of the whole shapes, and the whole results' shapes and strides.
        whole = op.check_and_allocate(*(_without_data(value) for value in call))
    except (TypeError, ValueError):
        # DTensor makes the same checks, and names the placements.
        return NotImplemented
    placed = _placements(op, call, x)
    compute = None if placed is None else _compute(op, call, placed)
    if placed is None or compute is None:
        return NotImplemented
    with torch.no_grad():
        own = [
            _own(value, list(given)) if isinstance(value, DTensor) else value
            for value, given in zip(call, placed.arguments, strict=True)
        ]
        found = compute(own)
        results = [
            None if value is None else _whole(value, placed.mesh, list(given), like)
            for value, like, given in zip(_tuple(found), _tuple(whole), placed.results, strict=True)
        ]
    return tuple(results) if isinstance(found, tuple) else results[0]


class Sharded(NamedTuple):
    """The tensor whose columns are sharded."""

    name: str
    tensor: DTensor
    # The dimension of the tensor.
    dim: int
    # The dimensions of the mesh that share columns.
    sharding: list[int]


class Placed(NamedTuple):
    """A call whose columns are sharded, and the placements of each result and argument."""

    x: Sharded
    results: list[tuple[Any, ...]]
    arguments: list[tuple[Any, ...]]

    @property
    def mesh(self) -> DeviceMesh:
        return self.x.tensor.device_mesh

    @property
    def columns(self) -> Any:
        return self.x.tensor.shape[self.x.dim]

    @property
    def devices(self) -> int:
        """The devices that share the columns of a row."""
        return math.prod(self.mesh.size(i) for i in self.x.sharding)

    def own_columns(self) -> tuple[Any, Any]:
        """The first of the device's columns, and how many it has: DTensor splits as torch.chunk."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        first, count = 0, self.columns
        for i in self.x.sharding:
            most = -(-count // self.mesh.size(i))
            start = min(most * coordinate[i], count)
            first, count = first + start, min(most, count - start)
        return first, count

    def reduce(self, value: Tensor, operation: str) -> Tensor:
        """The sum or the maximum over these devices."""
        for i in self.x.sharding:
            value = reduced(value, operation, (self.mesh, i))
        return value


def _sharded(op: Op, call: Any) -> Sharded | None:
    base = base_of(op.name)
    packed = base in GATED_COLUMNS
    if base not in (*SHARDED_COLUMNS, *GROUPED_COLUMNS, *GATED_COLUMNS):
        return None
    if packed and call.up is not None:
        return None
    if not all(_in_order(value) for value in call if isinstance(value, Tensor)):
        return None
    name = next(name for name in NAMES if name in call._fields)
    x = getattr(call, name)
    dim = 1 if base == "group_norm" else x.dim() - 1
    wanted: Any = Shard(dim)
    if packed and not getattr(call, "interleaved", False):
        wanted = _StridedShard(dim, split_factor=HALVES)
    sharding = [i for i, placement in enumerate(x.placements) if placement == wanted]
    others = [placement for i, placement in enumerate(x.placements) if i not in sharding]
    if not sharding or any(type(p) not in (Shard, Replicate) for p in others):
        return None
    if packed and (len(sharding) > 1 or Shard(dim) in others):
        return None
    return None if x.device_mesh.get_coordinate() is None else Sharded(name, x, dim, sharding)


def _in_order(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, whose shards of shards are in the order of the mesh's
    dimensions: placements do not tell another."""
    if not isinstance(tensor, DTensor):
        return False
    spec = tensor._spec
    order = spec.shard_order if tensor.device_mesh.ndim > 1 else None
    return order is None or order == spec.compute_default_shard_order(tensor.placements)


def _placements(op: Op, call: Any, x: Sharded) -> Placed | None:
    mesh, tensors = x.tensor.device_mesh, tensors_of(op, call, COLUMNS)
    axes = tensors.arguments[call._fields.index(x.name)].axes
    found = []
    for i, placement in enumerate(x.tensor.placements):
        axis = COLUMNS if i in x.sharding else None
        if axis is None and isinstance(placement, Shard):
            axis = axes[placement.dim]
            if axis is None:
                return None
        if axis is not None and axis not in shardable(tensors.sizes, mesh.size(i)):
            return None
        found.append(tensors.placements(axis))
    results, arguments = (list(zip(*kind, strict=True)) for kind in zip(*found, strict=True))
    if x.name == "gate":
        # The packed gate and its gradient, of which a device may have a part of both halves.
        arguments[call._fields.index("gate")] = tuple(x.tensor.placements)
        if op.name.endswith("_backward"):
            results[0] = tuple(x.tensor.placements)
    return Placed(x, results, arguments)


def _compute(op: Op, call: Any, placed: Placed) -> Compute | None:
    """How a device computes its columns; None if the columns have to move."""
    base, columns = base_of(op.name), placed.columns
    if base in GATED_COLUMNS:
        return _by_itself(op) if columns % (HALVES * placed.devices) == 0 else None
    groups = getattr(call, "num_groups", None)
    if getattr(call, "group_size", None) not in (None, columns):
        groups = columns // call.group_size
    if groups is not None and groups % placed.devices == 0:
        own = {"num_groups": groups // placed.devices} if "num_groups" in call._fields else {}
        return _by_itself(op, own)
    if base not in SHARDED_COLUMNS:
        return None
    if groups is None:
        return _by_statistics(op, placed)
    return _by_statistics_of_groups(op, call.group_size, placed)


def _by_itself(op: Op, changed: dict[str, Any] | None = None) -> Compute:
    """The device's kernel, which needs nothing of other devices."""
    return lambda own: op.overload(*op.arguments(*own)._replace(**changed or {}))


def _by_statistics(op: Op, placed: Placed) -> Compute:
    reductions = (lambda v: placed.reduce(v, "sum"), lambda v: placed.reduce(v, "max"))

    def compute(own: list[Any]) -> Any:
        with parts(Parts(placed.columns, *reductions)):
            return op.definition(*own)

    return compute


def _by_statistics_of_groups(op: Op, size: Any, placed: Placed) -> Compute:
    groups = Groups(size, placed.columns // size, *placed.own_columns())

    def compute(own: list[Any]) -> Any:
        def summed(value: Tensor) -> Tensor:
            return groups.own(placed.reduce(groups.among_all(value), "sum"))

        # A norm has no maximum.
        with parts(Parts(size, summed, summed)):
            found = op.definition(*(groups.padded(v) if isinstance(v, Tensor) else v for v in own))
        cut = [None if value is None else groups.cut(value) for value in _tuple(found)]
        return tuple(cut) if isinstance(found, tuple) else cut[0]

    return compute


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
