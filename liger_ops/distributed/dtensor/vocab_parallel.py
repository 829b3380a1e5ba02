"""Losses of DTensors whose vocabulary is sharded over one dimension of the mesh: a device computes
statistics of its words, and the devices gather a few numbers of each token."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from ...record import Op
from ..vocab_parallel import CLASS_WEIGHTS, SHARDED_LOSSES
from ..vocab_parallel.shard import VocabShard
from .parts import Placed, axes_of, placed_by, whole_results
from .rules import COMPUTED_BY_FORWARD, Line, base_of, line_of, tensors_of

VOCABULARY = "V"
# The most float32 numbers of a token that devices gather, for a loss that lists no words, and a
# divergence without labels.
NUMBERS = 5
# Arguments that need all words on one device: options that ask for results that are not sums over
# words, and statistics that are already those of all words.
WHOLE_ROWS = (
    "return_predicted", "return_entropy", "return_mean_logits", "return_log_sum_sq_probs",
    "known_student_lse",
)  # fmt: skip


def compute_by_vocab_shards(op: Op, call: Any) -> Any:
    """Return the results of a call whose vocabulary is sharded; NotImplemented for any other call,
    and for one that communicates less if DTensor gathers the sharded tensors."""
    loss = SHARDED_LOSSES.get(base_of(op.name))
    if loss is None:
        return NotImplemented
    options = (getattr(call, option, None) for option in WHOLE_ROWS)
    if any(value is not None and value is not False for value in options):
        return NotImplemented
    sharded, rows = getattr(call, loss.sharded), getattr(call, loss.rows)
    if not isinstance(sharded, DTensor):
        return NotImplemented
    by_words = Shard(loss.dim % sharded.dim())
    dimensions = [i for i, placement in enumerate(sharded.placements) if placement == by_words]
    if len(dimensions) != 1 or any(type(p) not in (Shard, Replicate) for p in sharded.placements):
        return NotImplemented
    dimension, mesh = dimensions[0], sharded.device_mesh
    wholes, line = whole_results(op, call), _with_shared_words(call, line_of(op, call))
    if wholes is None or line is None:
        return NotImplemented
    tensors = tensors_of(op, call, VOCABULARY, line)
    fixed = {dimension: VOCABULARY}
    axes = axes_of(tensors, call._fields.index(loss.rows), rows, fixed)
    if axes is None:
        return NotImplemented
    placed = _with_whole_results(op, call, placed_by(tensors, axes, mesh), dimension)
    if not _moves_less(call, placed, rows, dimension) or not _can_finish(call, placed):
        return NotImplemented
    placed = _without_rows(call, placed)
    group, rank = mesh.get_group(dimension).group_name, mesh.get_local_rank(dimension)
    shard = VocabShard.of_rank(group, rank, mesh.size(dimension), sharded.shape[loss.dim])
    backward = op.name.endswith("_backward")

    def compute(local: Any) -> Any:
        outputs = (loss.backward if backward else loss.forward)(op, local, shard)
        return outputs if len(outputs) > 1 else outputs[0]

    results = placed.run_locally(op, call, wholes, compute)
    if loss.sharded == loss.rows or not backward:
        return results
    return tuple(
        _sharded_as(gradient, getattr(call, name))
        for name, gradient in zip(loss.differentiated, results, strict=True)
    )


def _with_shared_words(call: Any, line: Line) -> Line | None:
    """Return the line of a call with one axis for the words of student and teacher, or None if they
    have different numbers of words."""
    teachers = [getattr(call, name, None) for name in ("teacher_weight", "teacher_logits")]
    words = [t.shape[0 if i == 0 else -1] for i, t in enumerate(teachers) if t is not None]
    if hasattr(call, "student_weight") and words != [call.student_weight.shape[0]]:
        return None
    arguments = {
        name: spec._replace(axes=tuple(VOCABULARY if a == "W" else a for a in spec.axes))
        for name, spec in line.arguments.items()
    }
    return line._replace(arguments=arguments)


def _moves_less(call: Any, placed: Placed, rows: Any, dimension: int) -> bool:
    """Return whether the statistics of the tokens, and the rows if they are sharded over the same
    devices, have fewer bytes than the tensors that are sharded over words, which DTensor would
    gather instead."""
    moved, instead = 0, 0
    for name, value, placements in zip(call._fields, call, placed.arguments, strict=True):
        if not isinstance(value, DTensor) or name in COMPUTED_BY_FORWARD:
            continue
        others = [i for i, p in enumerate(placements) if i != dimension and isinstance(p, Shard)]
        devices = math.prod(placed.mesh.size(i) for i in others)
        size = value.numel() * value.element_size() // devices
        if value is rows:
            numbers = _numbers(call, value, placed.mesh.size(dimension))
            moved += 4 * numbers * math.prod(value.shape[:-1]) // devices
        if isinstance(value.placements[dimension], Shard):
            if isinstance(placements[dimension], Shard):
                instead += size
            else:
                moved += size
    return bool(moved <= instead)


def _numbers(call: Any, rows: DTensor, ranks: int) -> int:
    """Return the most float32 numbers of a token that the devices gather."""
    listed = getattr(call, "teacher_ids", None)
    if listed is not None:
        return listed.shape[-1] + 2 * ranks
    listed = getattr(call, "sampling_top_log_prob", None)
    if listed is not None:
        return 4 + listed.shape[-1]
    words = getattr(call, "words", None)
    if hasattr(call, "k") or words is not None:
        # A word is an int64, of two float32.
        return 2 + 3 * (call.k if words is None else words.shape[-1])
    target = getattr(call, "target", None)
    if target is not None and target.dim() == rows.dim():
        return 3 + target.shape[-1]
    return NUMBERS


def _with_whole_results(op: Op, call: Any, placed: Placed, dimension: int) -> Placed:
    """Return the placements of a call whose words are sharded over a dimension of the mesh, where
    results and class weights are replicated. The gradients of tensors without words remain sums
    over it."""
    backward, names = op.name.endswith("_backward"), [result.name for result in op.schema.returns]
    results, arguments = list(placed.results), list(placed.arguments)
    for i, name in enumerate(names):
        if not backward and name not in COMPUTED_BY_FORWARD:
            results[i] = _replicated_on(dimension, results[i])
    if base_of(op.name) in CLASS_WEIGHTS:
        class_weight = call._fields.index(CLASS_WEIGHTS[base_of(op.name)])
        arguments[class_weight] = _replicated_on(dimension, arguments[class_weight])
    return placed._replace(results=results, arguments=arguments)


def _replicated_on(dimension: int, placements: tuple[Any, ...]) -> tuple[Any, ...]:
    if placements[dimension] is None:
        return placements
    return (*placements[:dimension], Replicate(), *placements[dimension + 1 :])


def _can_finish(call: Any, placed: Placed) -> bool:
    """Return whether the gradients that the forward computed have the placements of the backward.
    They have others if the forward needed all words on one device."""
    triples = zip(call._fields, call, placed.arguments, strict=True)
    computed = [(x, wanted) for name, x, wanted in triples if name in COMPUTED_BY_FORWARD]
    return all(x is None or tuple(x.placements) == tuple(wanted) for x, wanted in computed)


def _without_rows(call: Any, placed: Placed) -> Placed:
    """Return the placements of a call; for a backward op whose forward has computed every gradient,
    the rows keep theirs: they are not read, and need not be gathered."""
    if getattr(call, "dloss", None) is None or not hasattr(call, "dweight"):
        return placed
    computed = [getattr(call, name) is not None for name in COMPUTED_BY_FORWARD]
    if any(wanted and not done for wanted, done in zip(call.output_mask, computed, strict=True)):
        return placed
    arguments = [
        getattr(value, "placements", placements)
        if name.endswith(("x", "teacher_logits")) and name not in COMPUTED_BY_FORWARD
        else placements
        for name, value, placements in zip(call._fields, call, placed.arguments, strict=True)
    ]
    return placed._replace(arguments=arguments)


def _sharded_as(gradient: Any, tensor: Any) -> Any:
    """Redistribute a gradient to be sharded where its tensor is, by a reduce-scatter if it is a sum
    over the devices."""
    if gradient is None:
        return None
    pairs = zip(gradient.placements, tensor.placements, strict=True)
    placements = [wanted if type(wanted) is Shard else present for present, wanted in pairs]
    if placements == list(gradient.placements):
        return gradient
    return gradient.redistribute(placements=placements)
