"""Losses of DTensors whose vocabulary is sharded over one dimension of the mesh: a device computes
those of its words, and the devices gather a few numbers of each token."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from ...record import Op
from ..vocab_parallel import SHARDED_LOSSES
from ..vocab_parallel.shard import VocabShard
from .parts import Placed, axes_of, placed_by, whole_results
from .rules import COMPUTED_BY_FORWARD, Line, base_of, line_of, tensors_of

VOCABULARY = "V"
# float32 numbers of a token that move, at most, where no words are listed and a divergence has no
# labels.
NUMBERS = 5
# Arguments with one weight per class; every device needs all of them.
CLASS_WEIGHTS = {"cross_entropy": "weight", "linear_cross_entropy": "class_weight"}
# Arguments with which one device needs all words: results that are not sums over words, and sums
# that are already those of all words.
WHOLE_ROWS = (
    "return_predicted", "return_entropy", "return_mean_logits", "return_log_sum_sq_probs",
    "known_student_lse",
)  # fmt: skip


def computed_by_vocab_shards(op: Op, call: Any) -> Any:
    """The results of a call whose vocabulary is sharded, or NotImplemented for any other, and for
    one that is better computed otherwise."""
    loss = SHARDED_LOSSES.get(base_of(op.name))
    if loss is None:
        return NotImplemented
    options = (getattr(call, option, None) for option in WHOLE_ROWS)
    if any(value is not None and value is not False for value in options):
        return NotImplemented
    sharded, rows = getattr(call, loss.sharded), getattr(call, loss.rows)
    if not isinstance(sharded, DTensor):
        return NotImplemented
    of_words = Shard(loss.dim % sharded.dim())
    dimensions = [i for i, placement in enumerate(sharded.placements) if placement == of_words]
    if len(dimensions) != 1 or any(type(p) not in (Shard, Replicate) for p in sharded.placements):
        return NotImplemented
    dimension, mesh = dimensions[0], sharded.device_mesh
    wholes, line = whole_results(op, call), _of_same_words(call, line_of(op, call))
    if wholes is None or line is None:
        return NotImplemented
    tensors = tensors_of(op, call, VOCABULARY, line)
    known = {dimension: VOCABULARY}
    axes = axes_of(tensors, call._fields.index(loss.rows), rows, known)
    if axes is None:
        return NotImplemented
    placed = _of_all_words(op, call, placed_by(tensors, axes, mesh), dimension)
    if not _moves_less(call, placed, rows, dimension) or not _can_finish(call, placed):
        return NotImplemented
    placed = _without_rows(call, placed)
    group, rank = mesh.get_group(dimension).group_name, mesh.get_local_rank(dimension)
    shard = VocabShard.of_rank(group, rank, mesh.size(dimension), sharded.shape[loss.dim])
    backward = op.name.endswith("_backward")

    def compute(own: Any) -> Any:
        found = (loss.backward if backward else loss.forward)(op, own, shard)
        return found if len(found) > 1 else found[0]

    results = placed.computed(op, call, wholes, compute)
    if loss.sharded == loss.rows or not backward:
        return results
    return tuple(
        _sharded_as(gradient, getattr(call, name))
        for name, gradient in zip(loss.differentiated, results, strict=True)
    )


def _of_same_words(call: Any, line: Line) -> Line | None:
    """The axes of a call whose teacher has the student's words, or None if it has others."""
    teachers = [getattr(call, name, None) for name in ("teacher_weight", "teacher_logits")]
    words = [t.shape[0 if i == 0 else -1] for i, t in enumerate(teachers) if t is not None]
    if hasattr(call, "student_weight") and words != [call.student_weight.shape[0]]:
        return None
    arguments = {
        name: entry._replace(axes=tuple(VOCABULARY if a == "W" else a for a in entry.axes))
        for name, entry in line.arguments.items()
    }
    return line._replace(arguments=arguments)


def _moves_less(call: Any, placed: Placed, rows: Any, dimension: int) -> bool:
    """Whether the numbers of the tokens, and the rows if they are sharded over the same devices,
    are fewer bytes than what is sharded over words."""
    moved, instead = 0, 0
    for name, value, given in zip(call._fields, call, placed.arguments, strict=True):
        if not isinstance(value, DTensor) or name in COMPUTED_BY_FORWARD:
            continue
        others = [i for i, p in enumerate(given) if i != dimension and isinstance(p, Shard)]
        devices = math.prod(placed.mesh.size(i) for i in others)
        size = value.numel() * value.element_size() // devices
        if value is rows:
            numbers = _numbers(call, placed.mesh.size(dimension))
            moved += 4 * numbers * math.prod(value.shape[:-1]) // devices
        if isinstance(value.placements[dimension], Shard):
            if isinstance(given[dimension], Shard):
                instead += size
            else:
                moved += size
    return bool(moved <= instead)


def _numbers(call: Any, ranks: int) -> int:
    """float32 numbers of a token that move, at most."""
    listed = getattr(call, "teacher_ids", None)
    return NUMBERS if listed is None else listed.shape[-1] + 2 * ranks


def _of_all_words(op: Op, call: Any, placed: Placed, dimension: int) -> Placed:
    """The placements of a call over the words of a dimension of the mesh. The numbers of a token
    are those of all words, on every device; the gradient of what has no words is a sum."""
    backward, names = op.name.endswith("_backward"), [result.name for result in op.schema.returns]
    results, arguments = list(placed.results), list(placed.arguments)
    for i, name in enumerate(names):
        if not backward and name not in COMPUTED_BY_FORWARD:
            results[i] = _whole_at(dimension, results[i])
    if base_of(op.name) in CLASS_WEIGHTS:
        class_weight = call._fields.index(CLASS_WEIGHTS[base_of(op.name)])
        arguments[class_weight] = _whole_at(dimension, arguments[class_weight])
    return placed._replace(results=results, arguments=arguments)


def _whole_at(dimension: int, placements: tuple[Any, ...]) -> tuple[Any, ...]:
    if placements[dimension] is None:
        return placements
    return (*placements[:dimension], Replicate(), *placements[dimension + 1 :])


def _can_finish(call: Any, placed: Placed) -> bool:
    """Whether the gradients that the forward computed are those of words. They are not if it had to
    return what needs all words."""
    pairs = zip(call._fields, call, placed.arguments, strict=True)
    computed = [(x, given) for name, x, given in pairs if name in COMPUTED_BY_FORWARD]
    return all(x is None or tuple(x.placements) == tuple(given) for x, given in computed)


def _without_rows(call: Any, placed: Placed) -> Placed:
    """The placements of a backward op's call if the forward has computed every gradient: the rows
    are not read, and not gathered."""
    if getattr(call, "dloss", None) is None or not hasattr(call, "dweight"):
        return placed
    computed = [getattr(call, name) is not None for name in COMPUTED_BY_FORWARD]
    if any(wanted and not found for wanted, found in zip(call.output_mask, computed, strict=True)):
        return placed
    arguments = [
        getattr(value, "placements", given)
        if name.endswith(("x", "teacher_logits")) and name not in COMPUTED_BY_FORWARD
        else given
        for name, value, given in zip(call._fields, call, placed.arguments, strict=True)
    ]
    return placed._replace(arguments=arguments)


def _sharded_as(gradient: Any, tensor: Any) -> Any:
    """A gradient, sharded where its tensor is: there a sum over the devices is scattered."""
    if gradient is None:
        return None
    pairs = zip(gradient.placements, tensor.placements, strict=True)
    placements = [given if type(given) is Shard else found for found, given in pairs]
    if placements == list(gradient.placements):
        return gradient
    return gradient.redistribute(placements=placements)
