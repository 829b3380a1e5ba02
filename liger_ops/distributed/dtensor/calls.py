"""Handle a call of an op with DTensors before DTensor does: check it, and compute the calls for
which no sharding rule of DTensor serves."""

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
from .columns import compute_by_columns
from .vocab_parallel import compute_by_vocab_shards

# Each returns the results of a call, or NotImplemented for a call that it does not handle.
HANDLERS = (
    mean_reductions.mean_from_sums,
    mean_reductions.mean_over_elements,
    compute_by_columns,
    compute_by_vocab_shards,
)


def register_calls() -> None:
    """Have PyTorch call `_handle` for every op's call with a DTensor.

    PyTorch does so before it calls DTensor, and in every mode: with gradients, without, in
    inference mode, and while a graph is traced.
    """
    for op in OPS.values():
        op.custom_op.register_torch_dispatch(DTensor, partial(_handle, op))
    for name in COMPOSED:
        torch.library.register_torch_dispatch(f"{NAMESPACE}::{name}", DTensor, _decompose)


def _handle(
    op: Op, cls: Any, overload: Any, types: Any, args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Return the results of a call, or NotImplemented for a call that DTensor shards by the op's
    rule."""
    call = op.arguments(*args, **(kwargs or {}))
    _check(op, call)
    for handler in HANDLERS:
        results = handler(op, call)
        if results is not NotImplemented:
            return results
    return NotImplemented


def _decompose(
    cls: Any, overload: Any, types: Any, args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Call the ops that a composed op calls. In inference mode PyTorch does not decompose it."""
    return overload.decompose(*args, **(kwargs or {}))


def _check(op: Op, call: Any) -> None:
    """Raise an error that names the op and the argument for tensors that DTensor cannot combine."""
    tensors: dict[str, Any] = {
        name: arg for name, arg in call._asdict().items() if isinstance(arg, Tensor)
    }
    first = next(name for name, arg in tensors.items() if isinstance(arg, DTensor))
    mesh, placements = tensors[first].device_mesh, tensors[first].placements
    op_name = op.name.removesuffix("_forward")
    beside = f"which {first} has, with the placements {placements}"
    for name, arg in tensors.items():
        if isinstance(arg, DTensor):
            if arg.device_mesh != mesh:
                raise ValueError(
                    f"{op_name}: {name} must be a DTensor on the mesh {mesh}, {beside}; got the"
                    f" mesh {arg.device_mesh}, with the placements {arg.placements}"
                )
        # DTensor treats a tensor of one element as replicated.
        elif arg.numel() != 1 and not _replicates_plain_tensors():
            raise TypeError(
                f"{op_name}: {name} must be a DTensor on the mesh {mesh}, {beside}; got a plain"
                f" tensor of shape {tuple(arg.shape)}"
            )


def _replicates_plain_tensors() -> bool:
    """Return whether `torch.distributed.tensor.experimental.implicit_replication` is on."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)
