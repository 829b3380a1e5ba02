"""A call with DTensors that each device computes from its own parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...record import Op
from ..vocab_parallel.collectives import reduced
from .rules import Tensors, shardable


class Placed(NamedTuple):
    """The placements of a call's results and arguments, and the axis that each dimension of the
    mesh shards, or None."""

    results: list[tuple[Any, ...]]
    arguments: list[tuple[Any, ...]]
    axes: list[str | None]
    mesh: DeviceMesh

    def computed(
        self, op: Op, call: Any, wholes: tuple[Any, ...], compute: Callable[[Any], Any]
    ) -> Any:
        """The results as DTensors, of the shapes and strides of `wholes`, from a function of the
        call with the device's part in place of each DTensor."""
        with torch.no_grad():
            own = (
                _own(value, list(given)) if isinstance(value, DTensor) else value
                for value, given in zip(call, self.arguments, strict=True)
            )
            found = compute(op.arguments(*own))
            results = tuple(
                None if part is None else _whole(part, self.mesh, list(given), like)
                for part, like, given in zip(_tuple(found), wholes, self.results, strict=True)
            )
        return results if isinstance(found, tuple) else results[0]

    def over(self, dimensions: Sequence[int], operation: str) -> Callable[[Tensor], Tensor]:
        """The reduction of a device's values over dimensions of the mesh."""

        def reduce(value: Tensor) -> Tensor:
            for i in dimensions:
                value = reduced(value, operation, (self.mesh, i))
            return value

        return reduce


def whole_results(op: Op, call: Any) -> tuple[Any, ...] | None:
    """Tensors without data of the results' whole shapes and strides, or None for a call that a
    device does not compute from its parts: its checks fail, which DTensor makes too and names the
    placements; a tensor is none of DTensor's, and no number that every device has; or this process
    has no part."""
    tensors = [value for value in call if isinstance(value, Tensor)]
    if not all(
        _in_order(value) if isinstance(value, DTensor) else not value.dim() for value in tensors
    ):
        return None
    mesh = next(value.device_mesh for value in tensors if isinstance(value, DTensor))
    if mesh.get_coordinate() is None:
        return None
    try:
        return _tuple(op.check_and_allocate(*map(without_data, call)))
    except (TypeError, ValueError):
        return None


def _in_order(tensor: DTensor) -> bool:
    """Whether shards of shards are in the order of the mesh's dimensions: placements do not tell
    another."""
    spec = tensor._spec
    order = spec.shard_order if tensor.device_mesh.ndim > 1 else None
    return order is None or order == spec.compute_default_shard_order(tensor.placements)


def axes_of(
    tensors: Tensors, index: int, tensor: DTensor, known: Mapping[int, str] | None = None
) -> list[str | None] | None:
    """The axis of the argument of this index that each dimension of the mesh shards, but for those
    dimensions whose axes are known. None if one cannot be kept: it is of another kind of placement,
    or its axis is not one that may be sharded so."""
    placed, mesh = tensors.arguments[index], tensor.device_mesh
    assert placed is not None
    axes: list[str | None] = []
    for i, placement in enumerate(tensor.placements):
        if known is not None and i in known:
            axes.append(known[i])
            continue
        if type(placement) is Replicate:
            axes.append(None)
            continue
        axis = placed.axes[placement.dim] if type(placement) is Shard else None
        if axis not in shardable(tensors.sizes, mesh.size(i)):
            return None
        axes.append(axis)
    return axes


def placed_by(tensors: Tensors, axes: list[str | None], mesh: DeviceMesh) -> Placed:
    found = (tensors.placements(axis) for axis in axes)
    results, arguments = (list(zip(*kind, strict=True)) for kind in zip(*found, strict=True))
    return Placed(results, arguments, axes, mesh)


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


def without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
