"""`linear_divergence` of a rank's words: from a chunk of tokens at a time, the divergence of the
student's logits from the teacher's, the cross-entropy of labels, and the gradients of the student's
head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...library import OPS
from ...ops.heads.gradients import HeadGradients
from ...ops.heads.head import Head, both, finished_in_forward, rows_of, shaped, still_missing
from ...ops.heads.two_heads import (
    divisor,
    mixed,
    reduced,
    result_dtype,
    token_weights,
    upstream_of_sum,
    upstream_of_tokens,
    weights_and_items,
)
from ...ops.losses.cross_entropy import effective
from ...ops.losses.divergence import limit
from ...record import Op
from . import divergence
from .collectives import of_each_rank, start_gather, wait
from .divergence import Found
from .head import chunk_size, gradients_of, split
from .shard import IGNORED, VocabShard
from .token_losses import Labels, call_of_logits, gradients, local_statistics, of_all_ranks

LOSS, LOSS_GRADIENT = OPS["cross_entropy_forward"], OPS["cross_entropy_backward"]
DIVERGENCE, GRADIENT = OPS["divergence_forward"], OPS["divergence_backward"]
Upstream = tuple[Tensor | None, Tensor | None]


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """The collectives of `divergence`, for each chunk of tokens; with labels, the first one has
    three more numbers a token."""
    heads, (weights, items) = TwoHeads(call, shard), weights_and_items(call, result_dtype(call))
    made = heads.gradients(list(call.gradient_mask), in_forward=True)
    upstream = upstream_of_sum(call, weights)
    parts, surprisals = [], []
    for chunk, part, surprisal in heads.with_statistics():
        if any(call.gradient_mask):
            made.add(chunk.head, heads.dlogits(chunk, part, upstream))
        parts.append(part)
        surprisals += [] if surprisal is None else [surprisal]
    statistics, cross_entropy = torch.cat(parts, 1), None
    of_tokens, *_ = statistics.unbind()
    value = reduced(call, of_tokens, weights, items)
    if surprisals:
        cross_entropy = reduced(call, torch.cat(surprisals), weights, items)
    loss = mixed(call, value, cross_entropy)
    statistics = statistics.reshape(-1, *call.student_x.shape[:-1])
    return loss, value, cross_entropy, statistics, *shaped(made.results(), call), None


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """The gradients that the forward has not computed, from logits that are computed again."""
    # A mean's divisor is given here; the statistics have its dtype.
    items = divisor(call, call.statistics)
    done = finished_in_forward(call, items)
    missing = still_missing(call.output_mask, done)
    if not any(missing):
        return tuple(done)
    weights = token_weights(call, result_dtype(call)).reshape(-1)
    upstream = upstream_of_tokens(call, weights, items)
    statistics, heads = call.statistics.flatten(1), TwoHeads(call, shard)
    made = heads.gradients(missing, in_forward=False)
    for chunk in heads.chunks():
        made.add(chunk.head, heads.dlogits(chunk, statistics[:, chunk.tokens], upstream))
    return both(done, shaped(made.results(), call))


class Chunk(NamedTuple):
    tokens: slice
    head: Head
    logits: Tensor
    teacher: Tensor
    labels: Labels | None


class TwoHeads:
    """A student's head and its teacher, of the rank's words."""

    def __init__(self, call: Any, shard: VocabShard) -> None:
        self.call, self.shard = call, shard
        self.student = Head.of_call(call, "student_")
        self.teacher: Head | Tensor
        item_bytes = call.student_x.element_size()
        if call.teacher_logits is None:
            self.teacher = Head.of_call(call, "teacher_")
            item_bytes += call.teacher_x.element_size()
        else:
            self.teacher = rows_of(call.teacher_logits)
        self.labels, target = None, call.target
        if target is not None:
            local = shard.local(target, call.ignore_index)
            valid = shard.valid(target, call.ignore_index)
            self.labels = Labels(local.flatten(), shard.here(target).flatten(), valid.flatten())
        self.size = chunk_size(shard.most * item_bytes, call.chunk_bytes)
        names = ("softcap", "logit_scale")
        self.options = {name: getattr(call, f"student_{name}") for name in names}

    def gradients(self, wanted: list[bool], in_forward: bool) -> HeadGradients:
        given = (self.student, wanted, self.shard, self.size, self.call.accum_dtype)
        return gradients_of(*given, in_forward=in_forward)

    def chunks(self) -> Iterator[Chunk]:
        heads, teachers = split(self.student, self.size), split(self.teacher, self.size)
        first = 0
        for head, teacher in zip(heads, teachers, strict=True):
            tokens = slice(first, first + head.x.shape[0])
            first = tokens.stop
            taught = teacher.logits() if isinstance(teacher, Head) else teacher
            labels = None if self.labels is None else self.labels.of(tokens)
            yield Chunk(tokens, head, head.logits(), taught, labels)

    def with_statistics(self) -> Iterator[tuple[Chunk, Tensor, Tensor | None]]:
        """Yield each chunk with the op's statistics of all words and the surprisal of each target,
        which are gathered while the logits of the next one are computed."""
        last = None
        for chunk in self.chunks():
            gathering = start_gather(self._local(chunk), 0, self.shard.group)
            if last is not None:
                yield self._of_all_ranks(*last)
            last = chunk, gathering
        assert last is not None
        yield self._of_all_ranks(*last)

    def _local(self, chunk: Chunk) -> Tensor:
        parts = divergence.local_statistics(self._divergence(chunk))
        if chunk.labels is None:
            return parts
        call = call_of_logits(LOSS, chunk.logits, label_smoothing=0.0, **self.options)
        of_loss = local_statistics(LOSS, call, chunk.labels, self.shard)
        return torch.cat([parts, of_loss.to(parts.dtype)])

    def _of_all_ranks(self, chunk: Chunk, gathering: Tensor) -> tuple[Chunk, Tensor, Tensor | None]:
        ranks = of_each_rank(wait(gathering), gathering.shape[0] // self.shard.ranks)
        lse = error = nll = None
        if chunk.labels is not None:
            *of_labels, _ = of_all_ranks(ranks[:, -3:].flatten(0, 1), 3, ())
            # The op has no numbers of ignored tokens.
            ignored = chunk.labels.target == IGNORED
            lse, error, nll = (x.masked_fill(ignored, 0.0) for x in of_labels)
            nll = torch.where(chunk.labels.valid, nll, float("nan"))
            ranks = ranks[:, :-3]
        found = divergence.of_all_ranks(
            ranks.flatten(0, 1), self._divergence(chunk), self.shard.group
        )
        none = torch.zeros_like(found.divergence)
        of_cross_entropy = [none if x is None else x for x in (lse, error)]
        return chunk, torch.stack([*found, *of_cross_entropy]), nll

    def dlogits(self, chunk: Chunk, statistics: Tensor, upstream: Upstream) -> Tensor:
        """The gradient of the chunk's logits, from those of every token's divergence and
        cross-entropy."""
        *found, lse, error = statistics.unbind()
        soft, hard = (None if grad is None else grad[chunk.tokens] for grad in upstream)
        total = None if soft is None else self._of_divergence(chunk, Found(*found), soft)
        if hard is not None:
            part = self._of_labels(chunk, lse, error, hard)
            total = part if total is None else total + part
        return torch.zeros_like(chunk.logits) if total is None else total

    def _of_divergence(self, chunk: Chunk, found: Found, soft: Tensor) -> Tensor:
        given = self._divergence(chunk)._asdict()
        names = GRADIENT.arguments._fields
        kept = {name: value for name, value in given.items() if name in names}
        call = GRADIENT.arguments(
            ddivergence=soft, **kept, **found._asdict(), output_mask=[True, False]
        )
        gradient, _ = divergence.backward(GRADIENT, call, self.shard)
        assert gradient is not None
        softcap, logit_scale = self.options.values()
        if softcap is None:
            return gradient
        slope = logit_scale * (1 - (call.student_logits / softcap).square())
        return (gradient * slope).to(chunk.logits.dtype)

    def _of_labels(self, chunk: Chunk, lse: Tensor, error: Tensor, hard: Tensor) -> Tensor:
        assert chunk.labels is not None
        dlse = torch.where(chunk.labels.target == IGNORED, 0.0, hard)
        if chunk.logits.dtype is not torch.float64:
            # They are float64 if the teacher's logits alone are.
            lse, error, dlse = lse.float(), error.float(), dlse.float()
        call = call_of_logits(LOSS_GRADIENT, chunk.logits, label_smoothing=0.0, **self.options)
        upstream = (None, dlse, torch.where(chunk.labels.here, -dlse, 0.0))
        given = (chunk.labels, (lse, error), upstream, self.shard)
        gradient = gradients(LOSS_GRADIENT, call, *given)[0]
        assert gradient is not None
        return gradient

    def _divergence(self, chunk: Chunk) -> Any:
        """The call of `divergence_forward`, of which ignored tokens have the mark of
        `VocabShard.local`."""
        call = self.call
        student, temperature = _capped(call, "student_", chunk.logits, call.temperature)
        teacher, teacher_temperature = _capped(
            call, "teacher_", chunk.teacher, call.teacher_temperature or call.temperature
        )
        target = None if chunk.labels is None else chunk.labels.target
        given = (limit(call.kind, call.beta), call.beta, temperature, teacher_temperature, IGNORED)
        return DIVERGENCE.arguments(student, teacher, target, *given)


def _capped(call: Any, side: str, logits: Tensor, temperature: float) -> tuple[Tensor, float]:
    """A side's logits for a divergence, with a cap float32 ones, and their temperature. That of
    logits without a cap has their scale."""
    softcap, logit_scale = (getattr(call, f"{side}{name}") for name in ("softcap", "logit_scale"))
    if softcap is None:
        return logits, temperature / logit_scale
    return effective(logits, softcap, logit_scale), temperature
