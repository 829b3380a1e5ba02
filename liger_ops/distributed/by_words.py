"""Losses of DTensors whose vocabulary is sharded over one dimension of the mesh: a device computes
those of its words, and the devices gather a few numbers of each token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor, Replicate, Shard

from ..record import Op
from . import losses_by_words
from .parts import Placed, axes_of, can_compute, placed_by
from .rules import COMPUTED_BY_FORWARD, base_of, tensors_of
from .words import Words

VOCABULARY = "V"
# float32 numbers of a token that are gathered, at most.
NUMBERS = 3


class Way(NamedTuple):
    """How an op is computed: the tensor that is sharded over words and its dimension, the tensor
    that has the rows, and a function of the device's own call."""

    sharded: str
    dim: int
    rows: str
    compute: Callable[[Any, Words], Any]


WAYS = {
    "cross_entropy_forward": Way("logits", -1, "logits", losses_by_words.cross_entropy),
    "cross_entropy_backward": Way("logits", -1, "logits", losses_by_words.cross_entropy_backward),
    "linear_cross_entropy_forward": Way("weight", 0, "x", losses_by_words.linear_cross_entropy),
    "linear_cross_entropy_backward": Way(
        "weight", 0, "x", losses_by_words.linear_cross_entropy_backward
    ),
}
# Of classes, and of which every device needs the whole.
CLASS_WEIGHTS = {"cross_entropy": "weight", "linear_cross_entropy": "class_weight"}
# Results that need all words on one device.
WHOLE_ROWS = ("return_predicted", "return_entropy", "return_mean_logits", "return_log_sum_sq_probs")


def computed_by_words(op: Op, args: tuple[Any, ...]) -> Any:
    """The results of a call whose vocabulary is sharded, or NotImplemented for any other, and for
    one that is better computed otherwise."""
    way, call = WAYS.get(op.name), op.arguments(*args)
    if way is None or any(getattr(call, option, False) for option in WHOLE_ROWS):
        return NotImplemented
    sharded, rows = getattr(call, way.sharded), getattr(call, way.rows)
    if not isinstance(sharded, DTensor) or not can_compute(call):
        return NotImplemented
    of_words = Shard(way.dim % sharded.dim())
    dimensions = [i for i, placement in enumerate(sharded.placements) if placement == of_words]
    if len(dimensions) != 1 or any(type(p) not in (Shard, Replicate) for p in sharded.placements):
        return NotImplemented
    dimension, mesh = dimensions[0], sharded.device_mesh
    tensors = tensors_of(op, call, VOCABULARY)
    known = {dimension: VOCABULARY}
    axes = axes_of(tensors, call._fields.index(way.rows), rows, known)
    if axes is None or not _moves_less(sharded, rows, axes, dimension):
        return NotImplemented
    placed = _of_all_words(op, call, placed_by(tensors, axes, mesh), dimension)
    group, rank = mesh.get_group(dimension).group_name, mesh.get_local_rank(dimension)
    words = Words.of_rank(group, rank, mesh.size(dimension), sharded.shape[way.dim])
    results = placed.computed(op, call, lambda own: way.compute(own, words))
    if not op.name.endswith("_backward") or not isinstance(results, tuple):
        return results
    names = [result.name for result in op.schema.returns]
    return tuple(
        _sharded_as(gradient, getattr(call, name.removeprefix("d")))
        for name, gradient in zip(names, results, strict=True)
    )


def _moves_less(sharded: Any, rows: Any, axes: list[str | None], dimension: int) -> bool:
    """Whether the numbers of the tokens, and the rows if they are sharded over the same devices,
    are fewer bytes than the tensor that is sharded over words."""
    if sharded is rows:
        return bool(sharded.shape[-1] * sharded.element_size() >= 4 * NUMBERS)
    mesh = sharded.device_mesh
    of_rows = [i for i, axis in enumerate(axes) if axis is not None and i != dimension]
    devices = math.prod(mesh.size(i) for i in of_rows)
    of_token = 4 * NUMBERS
    if not rows.placements[dimension].is_replicate():
        of_token += rows.shape[-1] * rows.element_size()
    tokens = math.prod(rows.shape[:-1])
    return bool(tokens * of_token <= sharded.numel() * sharded.element_size() * devices)


def _of_all_words(op: Op, call: Any, placed: Placed, dimension: int) -> Placed:
    """The placements of a call over the words of a dimension of the mesh. The numbers of a token
    are those of all words, on every device; the gradient of what has no words is a sum."""
    backward, names = op.name.endswith("_backward"), [result.name for result in op.schema.returns]
    results, arguments = list(placed.results), list(placed.arguments)
    for i, name in enumerate(names):
        if not backward and name not in COMPUTED_BY_FORWARD:
            results[i] = _whole_at(dimension, results[i])
    class_weight = call._fields.index(CLASS_WEIGHTS[base_of(op.name)])
    arguments[class_weight] = _whole_at(dimension, arguments[class_weight])
    if backward and _is_computed(call):
        # The rows are not read, and need not be gathered.
        for name in ("x", "lora_x"):
            value = getattr(call, name)
            if value is not None:
                arguments[call._fields.index(name)] = value.placements
    return placed._replace(results=results, arguments=arguments)


def _whole_at(dimension: int, placements: tuple[Any, ...]) -> tuple[Any, ...]:
    if placements[dimension] is None:
        return placements
    return (*placements[:dimension], Replicate(), *placements[dimension + 1 :])


def _is_computed(call: Any) -> bool:
    """Whether the forward has computed every gradient that a backward op is asked for."""
    if not hasattr(call, "output_mask") or call.dloss is None:
        return False
    computed = (getattr(call, name) is not None for name in COMPUTED_BY_FORWARD)
    return all(
        found or not wanted for found, wanted in zip(computed, call.output_mask, strict=True)
    )


def _sharded_as(gradient: Any, tensor: Any) -> Any:
    """A gradient, sharded where its tensor is: there a sum over the devices is scattered."""
    if gradient is None:
        return None
    pairs = zip(gradient.placements, tensor.placements, strict=True)
    placements = [given if type(given) is Shard else found for found, given in pairs]
    if placements == list(gradient.placements):
        return gradient
    return gradient.redistribute(placements=placements)
