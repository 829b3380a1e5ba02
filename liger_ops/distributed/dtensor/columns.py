"""Norms, softmax and packed gates whose columns are sharded: a device computes its columns, and the
devices that share a row sum statistics of it. No activation moves between devices.

The bounds between devices may cut through groups of columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...library import declared
from ...ops.activations.gated import AXES as GATE_AND_UP
from ...ops.rows import ShardedColumns
from ...record import Op
from ...torch_private import StridedShard
from .parts import Placed, axes_of, placed_by, whole_results
from .rules import base_of, shardable, tensors_of


class ColumnGroups(NamedTuple):
    """A device's `columns` columns, from column `first` on, in `count` groups of `size` columns.

    The device computes with every group that it has a column of: the columns that it lacks are 0,
    and add nothing to the group's sums.
    """

    size: Any
    count: Any
    first: Any
    columns: Any

    @property
    def before(self) -> Any:
        """The number of columns of the device's first group that the device lacks."""
        return self.first % self.size

    @property
    def after(self) -> Any:
        """The number of columns of the device's last group that the device lacks."""
        return -(self.first + self.columns) % self.size

    def pad(self, tensor: Tensor) -> Tensor:
        """Pad the device's columns to whole groups."""
        return F.pad(tensor, (self.before, self.after))

    def unpad(self, tensor: Tensor) -> Tensor:
        """Undo `pad`."""
        return tensor.narrow(-1, self.before, self.columns).contiguous()

    def among_all(self, statistic: Tensor) -> Tensor:
        """Pad a statistic of the device's groups, (..., groups, 1), with 0 for all other groups."""
        after = self.count - self.first // self.size - statistic.shape[-2]
        return F.pad(statistic, (0, 0, self.first // self.size, after))

    def local(self, statistic: Tensor) -> Tensor:
        """Select the device's groups from a statistic of all groups."""
        count = (self.before + self.columns + self.after) // self.size
        return statistic.narrow(-2, self.first // self.size, count)


# Op -> the axis of its columns.
COLUMNS: dict[str, str] = defaultdict(lambda: "N", group_norm="C", attn_res="D")
# Ops whose columns may be sharded although their axis is an upper-case one: a device computes its
# columns by the op's definition, with statistics of rows that are summed over the devices.
SHARDED_COLUMNS = (
    "rms_norm", "fused_add_rms_norm", "gated_rms_norm", "layer_norm", "modulated_rms_norm",
    "modulated_layer_norm", "poly_norm", "softmax", "log_softmax", "attn_res",
)  # fmt: skip
# Ops of groups of columns: a device that has whole groups needs nothing of other devices.
GROUPED_COLUMNS = ("gated_rms_norm", "group_norm")
# The tensor whose placements say which columns a device has: x; in a backward the sum s of
# fused_add_rms_norm, or the result y of a softmax; or the packed gate.
NAMES = ("x", "s", "y", "gate")
# A packed tensor has two halves: a device has its columns of the gate, then those of the up.
HALVES = 2

# Computes a device's results from the call with its local tensors.
Compute = Callable[[Any], Any]


def compute_by_columns(op: Op, call: Any) -> Any:
    """Return the results of a call whose columns are sharded, or NotImplemented for any other."""
    x = _sharded(op, call)
    wholes = None if x is None else whole_results(op, call)
    if x is None or wholes is None:
        return NotImplemented
    placed = _placements(op, call, x)
    compute = None if placed is None else _compute(op, call, x, placed)
    if placed is None or compute is None:
        return NotImplemented
    return placed.run_locally(op, call, wholes, compute)


class Sharded(NamedTuple):
    """An argument whose columns are sharded."""

    name: str
    tensor: DTensor
    # The tensor's dimension of columns.
    dim: int
    # The dimensions of the mesh over which the columns are sharded.
    sharding: list[int]

    @property
    def columns(self) -> Any:
        return self.tensor.shape[self.dim]

    @property
    def devices(self) -> int:
        """The number of devices that share the columns of a row."""
        return math.prod(self.tensor.device_mesh.size(i) for i in self.sharding)

    def local_columns(self) -> tuple[Any, Any]:
        """Return the first of the device's columns and their number, where each dimension of the
        mesh in turn splits columns as torch.chunk does."""
        mesh = self.tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        first, count = 0, self.columns
        for i in self.sharding:
            most = -(-count // mesh.size(i))
            start = min(most * coordinate[i], count)
            first, count = first + start, min(most, count - start)
        return first, count


def _is_gated(op: Op) -> bool:
    """Return whether an op has a gate and an up that may be packed in one tensor: a device that has
    the same columns of both needs nothing of other devices."""
    return declared(op).axes == GATE_AND_UP


def _sharded(op: Op, call: Any) -> Sharded | None:
    """Return the argument whose columns are sharded; None if there is none, or if another dimension
    of the mesh has a placement that is not kept."""
    base = base_of(op.name)
    packed = _is_gated(op)
    if not packed and base not in (*SHARDED_COLUMNS, *GROUPED_COLUMNS):
        return None
    if packed and call.up is not None:
        return None
    name = next(name for name in NAMES if name in call._fields)
    x = getattr(call, name)
    if not isinstance(x, DTensor):
        return None
    dim = 1 if base == "group_norm" else x.dim() - 1
    by_columns: Any = Shard(dim)
    if packed and not getattr(call, "interleaved", False):
        by_columns = StridedShard(dim, split_factor=HALVES)
    sharding = [i for i, placement in enumerate(x.placements) if placement == by_columns]
    others = [placement for i, placement in enumerate(x.placements) if i not in sharding]
    if not sharding or any(type(p) not in (Shard, Replicate) for p in others):
        return None
    if packed and (len(sharding) > 1 or Shard(dim) in others):
        return None
    return Sharded(name, x, dim, sharding)


def _placements(op: Op, call: Any, x: Sharded) -> Placed | None:
    """Return the placements of the call's tensors, or None if they cannot be kept."""
    columns = COLUMNS[base_of(op.name)]
    mesh, tensors = x.tensor.device_mesh, tensors_of(op, call, columns)
    if any(columns not in shardable(tensors.sizes, mesh.size(i)) for i in x.sharding):
        return None
    fixed = dict.fromkeys(x.sharding, columns)
    axes = axes_of(tensors, call._fields.index(x.name), x.tensor, fixed)
    if axes is None:
        return None
    placed = placed_by(tensors, axes, mesh)
    arguments, results = list(placed.arguments), list(placed.results)
    if x.name == "gate":
        # Only the packed gate and its gradient may have the placement of halves, StridedShard.
        arguments[call._fields.index("gate")] = tuple(x.tensor.placements)
        if op.name.endswith("_backward"):
            results[0] = tuple(x.tensor.placements)
    return placed._replace(results=results, arguments=arguments)


def _compute(op: Op, call: Any, x: Sharded, placed: Placed) -> Compute | None:
    """Return the function by which a device computes its columns; None if they have to move."""
    base, columns, devices = base_of(op.name), x.columns, x.devices
    if _is_gated(op):
        return _by_itself(op) if columns % (HALVES * devices) == 0 else None
    groups = getattr(call, "num_groups", None)
    if getattr(call, "group_size", None) not in (None, columns):
        groups = columns // call.group_size
    if groups is not None and groups % devices == 0:
        changed = {"num_groups": groups // devices} if "num_groups" in call._fields else {}
        return _by_itself(op, changed)
    if base not in SHARDED_COLUMNS:
        return None
    if groups is None:
        return _by_statistics(op, x, placed)
    return _by_statistics_of_groups(op, call.group_size, x, placed)


def _by_itself(op: Op, changed: dict[str, Any] | None = None) -> Compute:
    """Run the op on the local tensors, with some arguments changed."""
    return lambda local: op.overload(*local._replace(**changed or {}))


def _by_statistics(op: Op, x: Sharded, placed: Placed) -> Compute:
    """Run the definition, with the sums and maxima of rows reduced over the devices."""
    reductions = (placed.over(x.sharding, operation) for operation in ("sum", "max"))
    rows = ShardedColumns(x.columns, *reductions)
    return lambda local: op.definition(*local, rows=rows)


def _by_statistics_of_groups(op: Op, size: Any, x: Sharded, placed: Placed) -> Compute:
    """Run the definition, with the sums of groups reduced over the devices that share a group."""
    groups = ColumnGroups(size, x.columns // size, *x.local_columns())
    over_devices = placed.over(x.sharding, "sum")

    def summed(value: Tensor) -> Tensor:
        return groups.local(over_devices(groups.among_all(value)))

    def compute(local: Any) -> Any:
        padded = (groups.pad(v) if isinstance(v, Tensor) else v for v in local)
        # The second function is for a maximum, which norms do not compute.
        output = op.definition(*padded, rows=ShardedColumns(size, summed, summed))
        results = output if isinstance(output, tuple) else (output,)
        unpadded = tuple(None if value is None else groups.unpad(value) for value in results)
        return unpadded if isinstance(output, tuple) else unpadded[0]

    return compute
