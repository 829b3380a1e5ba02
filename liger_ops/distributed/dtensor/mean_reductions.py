"""Means over sharded rows, whose divisor no single device knows: the devices all-reduce the sums
that it divides, and the divisor itself if it depends on the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...library import OPS
from ...lowering.common.losses.distribution_loss import FORMS
from ...ops.heads.two_heads import result_dtype, token_weights
from ...record import Op
from ..vocab_parallel.shard import reduced
from .parts import axes_of, placed_by, whole_results, without_data
from .rules import base_of, line_of, tensors_of

# Ops -> their results that are sums over tokens or, for a mean, such sums divided by the weight of
# all tokens.
SUMS = {
    "cross_entropy_forward": ("loss", "z_loss", "total_weight"),
    "linear_cross_entropy_forward": ("loss", "z_loss", "total_weight"),
    "linear_score_centering_forward": ("loss", "total_weight"),
    "linear_divergence_forward": ("loss", "divergence", "cross_entropy"),
}


def mean_from_sums(op: Op, call: Any) -> Any:
    """Compute a mean without num_items_in_batch from the sums of the devices; return NotImplemented
    for any other call. The sums are all-reduced together, so that every device has the same mean.
    The backward then runs with this divisor as num_items_in_batch."""
    if getattr(call, "num_items_in_batch", 0) is not None or call.reduction != "mean":
        return NotImplemented
    if op.name.endswith("_backward"):
        return op.overload(*call._replace(num_items_in_batch=_divisor_again(call)))
    names = [result.name for result in op.schema.returns]
    results = dict(zip(names, op.overload(*call._replace(reduction="sum")), strict=True))
    sums = {name: results[name] for name in SUMS[op.name] if results[name] is not None}
    with torch.no_grad():
        if "total_weight" in sums:
            *numbers, items = on_every_device(list(sums.values()))
            results["total_weight"] = items
        else:
            *numbers, items = on_every_device([*sums.values(), _weight_of_tokens(call)])
            items = _at_least_one_token(items)
        for name, number in zip(sums, numbers, strict=False):
            results[name] = _divide(number, items)
    return tuple(results[name] for name in names)


def mean_over_elements(op: Op, call: Any) -> Any:
    """Compute a mean over the elements of two tensors that are sharded along any dimension; return
    NotImplemented for any other call.

    A device's mean, times its divisor and divided by that of all devices, is its term of the whole
    mean.
    """
    name = base_of(op.name)
    if name not in FORMS or getattr(call, "reduction", "mean") in ("none", "sum"):
        return NotImplemented
    form = FORMS[name]
    first = call._fields.index(OPS[name].arguments._fields[0])
    x = call[first]
    wholes = whole_results(op, call) if isinstance(x, DTensor) else None
    if wholes is None:
        return NotImplemented
    tensors = tensors_of(op, call, line=line_of(op, call, "sum"))
    axes = axes_of(tensors, first, x)
    if axes is None or not any(axes):
        return NotImplemented
    placed = placed_by(tensors, axes, x.device_mesh)
    of_rows = [i for i, axis in enumerate(axes) if axis is not None and axis.startswith("*")]
    count = placed.over(of_rows, "sum")

    def compute(local_call: Any) -> Any:
        local, whole = form(local_call), form(op.arguments(*map(without_data, call)))
        rows = None if local.within is None else count(local.within.sum())
        divisors = local.divisor, whole.divided_by(rows)
        if op.name.endswith("_backward"):
            return op.overload(*local_call._replace(dloss=_rescale(local_call.dloss, *divisors)))
        return _rescale(op.overload(*local_call), *divisors)

    result = placed.run_locally(op, call, wholes, compute)
    return result if op.name.endswith("_backward") else on_every_device([result])[0]


def _rescale(value: Tensor, divisor: Tensor | int, whole: Tensor | int) -> Tensor:
    return value * divisor / whole


def _divisor_again(call: Any) -> Tensor:
    """Return the divisor of a mean for its backward: the forward's total_weight, if it returned
    one, or the divisor computed again."""
    if hasattr(call, "total_weight"):
        return call.total_weight
    with torch.no_grad():
        return _at_least_one_token(on_every_device([_weight_of_tokens(call)])[0])


def _weight_of_tokens(call: Any) -> Tensor:
    """Return the sum of `token_weights`: a DTensor, or without weights a number of all devices."""
    x, dtype = call.student_x, result_dtype(call)
    if call.target is None and call.token_weight is None:
        return torch.full((), math.prod(x.shape[:-1]), dtype=dtype, device=x.device)
    return token_weights(call, dtype).sum()


def _at_least_one_token(total: Tensor) -> Tensor:
    """Return a divisor that is not 0: the mean over no tokens is 0."""
    return torch.where(total == 0, 1.0, total)


def on_every_device(values: Sequence[Any]) -> list[Any]:
    """Replicate numbers: those with the same placements by one collective."""
    replicated = list(values)
    sharded = [value for value in values if isinstance(value, DTensor)]
    for placements in dict.fromkeys(value.placements for value in sharded):
        indices = [
            i for i, value in enumerate(values)
            if isinstance(value, DTensor) and value.placements == placements
        ]  # fmt: skip
        mesh = sharded[0].device_mesh
        numbers = torch.stack([values[i].to_local() for i in indices])
        # Not by `redistribute`: DTensor warns about a sum over several dimensions of the mesh.
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Partial):
                numbers = reduced(numbers, placement.reduce_op, (mesh, dimension))
        for i, number in zip(indices, numbers.unbind(), strict=True):
            replicated[i] = DTensor.from_local(
                number.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False
            )
    return replicated


def _divide(number: Any, items: Any) -> Any:
    """Divide a DTensor by a number that is a plain tensor or a DTensor."""
    divisor = items.to_local() if isinstance(items, DTensor) else items
    local = number.to_local() / divisor
    return DTensor.from_local(local, number.device_mesh, number.placements, run_check=False)
