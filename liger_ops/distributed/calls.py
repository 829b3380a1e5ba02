"""A call of an op with DTensors: its checks, before DTensor is given it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..record import Op
from . import means
from .by_words import computed_by_words
from .columns import computed_by_columns


def redispatch(op: Op, keyset: torch._C.DispatchKeySet, args: tuple[Any, ...]) -> Any:
    """Run a call that has a tensor of a subclass among its arguments, below autograd."""
    sharded = next((i for i, arg in enumerate(args) if isinstance(arg, DTensor)), None)
    if sharded is None:
        return op.overload.redispatch(keyset, *args)
    _check(op, args, sharded)
    try:
        return means.of_sums(op, args, partial(_run, keyset))
    except (RuntimeError, TypeError, ValueError) as error:
        # DTensor makes a RuntimeError of what the op's checks raise for the whole shapes.
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, (TypeError, ValueError)):
            raise type(cause)(f"{cause}; {_placements(op, args)}") from error
        raise


def _run(keyset: torch._C.DispatchKeySet, op: Op, args: tuple[Any, ...]) -> Any:
    for computed in (computed_by_columns, computed_by_words, means.of_terms):
        results = computed(op, args)
        if results is not NotImplemented:
            return results
    return op.overload.redispatch(keyset, *args)


def _check(op: Op, args: tuple[Any, ...], sharded: int) -> None:
    """Raise for tensors that DTensor cannot bring together, in the words of the op."""
    names = [argument.name for argument in op.schema.arguments]
    mesh, name_of_op = args[sharded].device_mesh, op.name.removesuffix("_forward")
    beside = f"which {names[sharded]} has, with the placements {args[sharded].placements}"
    for name, arg in zip(names, args, strict=False):
        if isinstance(arg, DTensor):
            if arg.device_mesh != mesh:
                raise ValueError(
                    f"{name_of_op}: {name} must be a DTensor on the mesh {mesh}, {beside}; got the"
                    f" mesh {arg.device_mesh}, with the placements {arg.placements}"
                )
        # DTensor takes a number as replicated.
        elif isinstance(arg, Tensor) and arg.numel() != 1 and not _replicates_plain_tensors():
            raise TypeError(
                f"{name_of_op}: {name} must be a DTensor on the mesh {mesh}, {beside}; got a plain"
                f" tensor of shape {tuple(arg.shape)}"
            )


def _replicates_plain_tensors() -> bool:
    """Whether the call is within `torch.distributed.tensor.experimental.implicit_replication`."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def _placements(op: Op, args: tuple[Any, ...]) -> str:
    """The meshes and placements of a call, for an error."""
    names = [argument.name for argument in op.schema.arguments]
    found = [(n, arg) for n, arg in zip(names, args, strict=False) if isinstance(arg, DTensor)]
    placed = ", ".join(f"{name} {tuple(arg.placements)}" for name, arg in found)
    return f"on {found[0][1].device_mesh}, with the placements {placed}"
