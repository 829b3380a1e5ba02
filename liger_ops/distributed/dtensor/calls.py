"""A call of an op with DTensors, before DTensor shards it: its checks, and the results that the
devices compute themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...library import COMPOSED, NAMESPACE, OPS
from ...record import Op
from . import mean_reductions
from .columns import computed_by_columns
from .vocab_parallel import computed_by_vocab_shards

# Each returns NotImplemented for a call that is not its own.
COMPUTED = (
    mean_reductions.mean_from_sums,
    mean_reductions.mean_over_elements,
    computed_by_columns,
    computed_by_vocab_shards,
)


def register_calls() -> None:
    """Give DTensor's calls of every op to `_taken`.

    PyTorch asks this rule before DTensor in every mode: with gradients, without, in inference mode,
    and while a graph is traced.
    """
    for op in OPS.values():
        op.custom_op.register_torch_dispatch(DTensor, partial(_taken, op))
    for name in COMPOSED:
        torch.library.register_torch_dispatch(f"{NAMESPACE}::{name}", DTensor, _composed)


def _taken(
    op: Op, cls: Any, overload: Any, types: Any, args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """The results of a call, or NotImplemented for one that DTensor shards by the op's rule."""
    call = op.arguments(*args, **(kwargs or {}))
    _check(op, call)
    for computed in COMPUTED:
        results = computed(op, call)
        if results is not NotImplemented:
            return results
    return NotImplemented


def _composed(
    cls: Any, overload: Any, types: Any, args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Call the ops of a composed one: in inference mode PyTorch gives it to DTensor undivided."""
    return overload.decompose(*args, **(kwargs or {}))


def _check(op: Op, call: Any) -> None:
    """Raise for tensors that DTensor cannot bring together, in the words of the op."""
    tensors: dict[str, Any] = {
        name: arg for name, arg in call._asdict().items() if isinstance(arg, Tensor)
    }
    first = next(name for name, arg in tensors.items() if isinstance(arg, DTensor))
    mesh, placements = tensors[first].device_mesh, tensors[first].placements
    name_of_op = op.name.removesuffix("_forward")
    beside = f"which {first} has, with the placements {placements}"
    for name, arg in tensors.items():
        if isinstance(arg, DTensor):
            if arg.device_mesh != mesh:
                raise ValueError(
                    f"{name_of_op}: {name} must be a DTensor on the mesh {mesh}, {beside}; got the"
                    f" mesh {arg.device_mesh}, with the placements {arg.placements}"
                )
        # DTensor takes a number as replicated.
        elif arg.numel() != 1 and not _replicates_plain_tensors():
            raise TypeError(
                f"{name_of_op}: {name} must be a DTensor on the mesh {mesh}, {beside}; got a plain"
                f" tensor of shape {tuple(arg.shape)}"
            )


def _replicates_plain_tensors() -> bool:
    """Whether the call is within `torch.distributed.tensor.experimental.implicit_replication`."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)
