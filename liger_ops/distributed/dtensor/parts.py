"""Compute a call with DTensors on each device, from its local parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...record import Op
from ..vocab_parallel.shard import reduced
from .rules import Tensors, shardable


class Placed(NamedTuple):
    """The placements with which a call is computed."""

    results: list[tuple[Any, ...]]
    arguments: list[tuple[Any, ...]]
    # The axis that each dimension of the mesh shards, or None.
    axes: list[str | None]
    mesh: DeviceMesh

    def run_locally(
        self, op: Op, call: Any, wholes: tuple[Any, ...], compute: Callable[[Any], Any]
    ) -> Any:
        """Redistribute the arguments, call `compute` with the call that has the device's local
        tensors in place of DTensors, and return its results as DTensors of the shapes and strides
        of `wholes`."""
        with torch.no_grad():
            local = (
                _local(value, list(placements)) if isinstance(value, DTensor) else value
                for value, placements in zip(call, self.arguments, strict=True)
            )
            outputs = compute(op.arguments(*local))
            results = tuple(
                None if part is None else _from_local(part, self.mesh, list(placements), like)
                for part, like, placements in zip(
                    _tuple(outputs), wholes, self.results, strict=True
                )
            )
        return results if isinstance(outputs, tuple) else results[0]

    def over(self, dimensions: Sequence[int], operation: str) -> Callable[[Tensor], Tensor]:
        """Return a function that reduces the devices' values over dimensions of the mesh."""

        def reduce(value: Tensor) -> Tensor:
            for i in dimensions:
                value = reduced(value, operation, (self.mesh, i))
            return value

        return reduce


def whole_results(op: Op, call: Any) -> tuple[Any, ...] | None:
    """Return tensors without data that have the shapes and strides of the whole results; None for a
    call that the devices do not compute from local parts, for one of these reasons:

    * the call's checks fail: DTensor runs them too, and adds the placements to the message;
    * a tensor is neither a DTensor nor a number, or its shards are in an unusual order;
    * this process is not in the mesh.
    """
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
    """Return whether a tensor that several dimensions of the mesh shard is split by them in their
    order. Placements do not say another order."""
    spec = tensor._spec
    order = spec.shard_order if tensor.device_mesh.ndim > 1 else None
    return order is None or order == spec.compute_default_shard_order(tensor.placements)


def axes_of(
    tensors: Tensors, index: int, tensor: DTensor, fixed: Mapping[int, str] | None = None
) -> list[str | None] | None:
    """Return for each dimension of the mesh the axis of the argument `index` that it shards, or
    None; `fixed` gives the axes of some dimensions. Return None instead of the list if a placement
    cannot be kept: it is neither Shard nor Replicate, or the axis may not be sharded."""
    placed, mesh = tensors.arguments[index], tensor.device_mesh
    assert placed is not None
    axes: list[str | None] = []
    for i, placement in enumerate(tensor.placements):
        if fixed is not None and i in fixed:
            axes.append(fixed[i])
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
    """Return the placements of a call if each dimension of the mesh shards one of `axes`."""
    by_dimension = (tensors.placements(axis) for axis in axes)
    # From (results, arguments) for each dimension to all dimensions of each tensor.
    results, arguments = (list(zip(*side, strict=True)) for side in zip(*by_dimension, strict=True))
    return Placed(results, arguments, axes, mesh)


def _local(tensor: DTensor, placements: list[Any]) -> Tensor:
    """Redistribute a tensor to these placements, and return the device's part."""
    if list(tensor.placements) != placements:
        # PyTorch 2.11 cannot redistribute a tensor that requires a gradient below autograd.
        detached: Any = tensor.detach()
        tensor = detached.redistribute(placements=placements)
    return tensor.to_local()


def _from_local(local: Tensor, mesh: DeviceMesh, placements: list[Any], like: Tensor) -> DTensor:
    """Return the DTensor of the devices' parts, of the shape and strides of `like`."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def without_data(value: Any) -> Any:
    """Return a tensor on the device "meta" in place of a tensor, and any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
