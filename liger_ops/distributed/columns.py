"""Norms and softmax of rows whose columns are sharded: a device computes its columns, and the
devices sum statistics of the rows. No activation moves."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard

from ..ops.rows import Parts, parts
from ..record import Op
from .axes import SHARDED_COLUMNS
from .parts import Placed, axes_of, can_compute, placed_by
from .rules import base_of, tensors_of

COLUMNS = "N"
# The tensor whose rows have the statistics: x, the sum s of the op that adds, or the result y from
# which a softmax's gradient is computed.
NORMALISED = ("x", "s", "y")


def computed_by_columns(op: Op, args: tuple[Any, ...]) -> Any:
    """The results of a call whose columns are sharded, or NotImplemented for any other."""
    call = op.arguments(*args)
    placed = _placed(op, call)
    if placed is None:
        return NotImplemented
    x: Any = _normalised(call)[1]
    sharing = placed.sharing(COLUMNS)
    whole_rows = Parts(x.shape[-1], placed.over(sharing, "sum"), placed.over(sharing, "max"))

    def compute(own: Any) -> Any:
        with parts(whole_rows):
            return op.definition(*own)

    return placed.computed(op, call, compute)


def _normalised(call: Any) -> tuple[int, DTensor]:
    name = next(name for name in NORMALISED if name in call._fields)
    return call._fields.index(name), getattr(call, name)


def _placed(op: Op, call: Any) -> Placed | None:
    if base_of(op.name) not in SHARDED_COLUMNS:
        return None
    index, x = _normalised(call)
    if not isinstance(x, DTensor) or Shard(x.dim() - 1) not in x.placements:
        return None
    if getattr(call, "group_size", None) not in (None, x.shape[-1]) or not can_compute(call):
        return None
    tensors = tensors_of(op, call, COLUMNS)
    axes = axes_of(tensors, index, x)
    return None if axes is None else placed_by(tensors, axes, x.device_mesh)
