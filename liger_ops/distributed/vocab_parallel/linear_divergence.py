"""`linear_divergence` over a sharded vocabulary, a chunk of tokens at a time: the divergence of the
student's logits from the teacher's, the cross-entropy of labels, and the gradients of the student's
head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...library import OPS
from ...ops.heads.gradients import HeadGradients
from ...ops.heads.head import Head, finished_in_forward, first_given, rows_of, shaped, still_missing
from ...ops.heads.two_heads import (
    mixed,
    reduced,
    result_dtype,
    upstream_of_sum,
    upstream_of_tokens,
    weights_and_items,
)
from ...ops.losses.cross_entropy import effective
from ...ops.losses.divergence import limit
from ...record import Op
from . import divergence
from .divergence import DivergenceResults
from .head import chunk_size, gradients_of, split
from .shard import IGNORED, VocabShard, start_gather, view_by_rank, wait
from .token_losses import Labels, call_of_logits, combine_ranks, gradients, local_statistics

LOSS, LOSS_GRADIENT = OPS["cross_entropy_forward"], OPS["cross_entropy_backward"]
DIVERGENCE, GRADIENT = OPS["divergence_forward"], OPS["divergence_backward"]
Upstream = tuple[Tensor | None, Tensor | None]


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the op's results. Each chunk of tokens has the collectives of `divergence`; with
    labels, the first one has three more numbers a token."""
    heads, (weights, items) = TwoHeads(call, shard), weights_and_items(call, result_dtype(call))
    head_gradients = heads.gradients(list(call.gradient_mask), in_forward=True)
    upstream = upstream_of_sum(call, weights)
    chunks, surprisals = [], []
    for chunk, of_chunk, surprisal in heads.with_statistics():
        if any(call.gradient_mask):
            head_gradients.add(chunk.head, heads.dlogits(chunk, of_chunk, upstream))
        chunks.append(of_chunk)
        surprisals += [] if surprisal is None else [surprisal]
    statistics, cross_entropy = torch.cat(chunks, 1), None
    divergences, *_ = statistics.unbind()
    value = reduced(call, divergences, weights, items)
    if surprisals:
        cross_entropy = reduced(call, torch.cat(surprisals), weights, items)
    loss = mixed(call, value, cross_entropy)
    statistics = statistics.reshape(-1, *call.student_x.shape[:-1])
    return loss, value, cross_entropy, statistics, *shaped(head_gradients.results(), call), None


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the gradients, and the logits again for those that the forward has not computed."""
    weights, items = weights_and_items(call, result_dtype(call))
    done = finished_in_forward(call, items)
    missing = still_missing(call.output_mask, done)
    if not any(missing):
        return tuple(done)
    upstream = upstream_of_tokens(call, weights, items)
    statistics, heads = call.statistics.flatten(1), TwoHeads(call, shard)
    head_gradients = heads.gradients(missing, in_forward=False)
    for chunk in heads.chunks():
        head_gradients.add(chunk.head, heads.dlogits(chunk, statistics[:, chunk.tokens], upstream))
    return first_given(done, shaped(head_gradients.results(), call))


class StudentTeacherChunk(NamedTuple):
    """A chunk of tokens: their student's head and logits, the teacher's logits, and the labels."""

    tokens: slice
    head: Head
    logits: Tensor
    teacher: Tensor
    labels: Labels | None


class TwoHeads:
    """A student's head and its teacher, with the rank's words."""

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
            index = shard.local_index(target, call.ignore_index)
            valid = shard.valid(target, call.ignore_index)
            self.labels = Labels(index.flatten(), shard.is_local(target).flatten(), valid.flatten())
        self.size = chunk_size(shard.most * item_bytes, call.chunk_bytes)
        names = ("softcap", "logit_scale")
        self.options = {name: getattr(call, f"student_{name}") for name in names}

    def gradients(self, wanted: list[bool], in_forward: bool) -> HeadGradients:
        arguments = (self.student, wanted, self.shard, self.size, self.call.accum_dtype)
        return gradients_of(*arguments, in_forward=in_forward)

    def chunks(self) -> Iterator[StudentTeacherChunk]:
        heads, teachers = split(self.student, self.size), split(self.teacher, self.size)
        first = 0
        for head, teacher in zip(heads, teachers, strict=True):
            tokens = slice(first, first + head.x.shape[0])
            first = tokens.stop
            teacher_logits = teacher.logits() if isinstance(teacher, Head) else teacher
            labels = None if self.labels is None else self.labels.of(tokens)
            yield StudentTeacherChunk(tokens, head, head.logits(), teacher_logits, labels)

    def with_statistics(self) -> Iterator[tuple[StudentTeacherChunk, Tensor, Tensor | None]]:
        """Yield each chunk with the op's statistics for all words, and the negative log-probability
        of each target. They are gathered while the logits of the next chunk are computed."""
        last = None
        for chunk in self.chunks():
            gathering = start_gather(self._local(chunk), 0, self.shard.group)
            if last is not None:
                yield self._combine_ranks(*last)
            last = chunk, gathering
        assert last is not None
        yield self._combine_ranks(*last)

    def _local(self, chunk: StudentTeacherChunk) -> Tensor:
        parts = divergence.local_statistics(self._divergence(chunk))
        if chunk.labels is None:
            return parts
        call = call_of_logits(LOSS, chunk.logits, label_smoothing=0.0, **self.options)
        of_loss = local_statistics(LOSS, call, chunk.labels, self.shard)
        return torch.cat([parts, of_loss.to(parts.dtype)])

    def _combine_ranks(
        self, chunk: StudentTeacherChunk, gathering: Tensor
    ) -> tuple[StudentTeacherChunk, Tensor, Tensor | None]:
        ranks = view_by_rank(wait(gathering), gathering.shape[0] // self.shard.ranks)
        lse = error = nll = None
        if chunk.labels is not None:
            *of_labels, _ = combine_ranks(ranks[:, -3:].flatten(0, 1), 3, ())
            # As in the op's results, statistics of ignored tokens are 0.
            ignored = chunk.labels.target == IGNORED
            lse, error, nll = (x.masked_fill(ignored, 0.0) for x in of_labels)
            nll = torch.where(chunk.labels.valid, nll, float("nan"))
            ranks = ranks[:, :-3]
        results = divergence.combine_ranks(
            ranks.flatten(0, 1), self._divergence(chunk), self.shard.group
        )
        none = torch.zeros_like(results.divergence)
        of_cross_entropy = [none if x is None else x for x in (lse, error)]
        return chunk, torch.stack([*results, *of_cross_entropy]), nll

    def dlogits(self, chunk: StudentTeacherChunk, statistics: Tensor, upstream: Upstream) -> Tensor:
        """Compute the gradient of the chunk's logits from the gradients of each token's divergence
        and cross-entropy."""
        *results, lse, error = statistics.unbind()
        soft, hard = (None if grad is None else grad[chunk.tokens] for grad in upstream)
        total = (
            None if soft is None else self._soft_dlogits(chunk, DivergenceResults(*results), soft)
        )
        if hard is not None:
            hard_dlogits = self._hard_dlogits(chunk, lse, error, hard)
            total = hard_dlogits if total is None else total + hard_dlogits
        return torch.zeros_like(chunk.logits) if total is None else total

    def _soft_dlogits(
        self, chunk: StudentTeacherChunk, results: DivergenceResults, soft: Tensor
    ) -> Tensor:
        """Compute the gradient of the chunk's logits from that of each token's divergence."""
        forward_call = self._divergence(chunk)._asdict()
        names = GRADIENT.arguments._fields
        shared = {name: value for name, value in forward_call.items() if name in names}
        call = GRADIENT.arguments(
            ddivergence=soft, **shared, **results._asdict(), output_mask=[True, False]
        )
        gradient, _ = divergence.backward(GRADIENT, call, self.shard)
        assert gradient is not None
        softcap, logit_scale = self.options.values()
        if softcap is None:
            return gradient
        # student_logits are capped here: c * tanh(s * z / c), whose slope is s * (1 - tanh**2).
        slope = logit_scale * (1 - (call.student_logits / softcap).square())
        return (gradient * slope).to(chunk.logits.dtype)

    def _hard_dlogits(
        self, chunk: StudentTeacherChunk, lse: Tensor, error: Tensor, hard: Tensor
    ) -> Tensor:
        """Compute the gradient of the chunk's logits from that of each token's cross-entropy."""
        assert chunk.labels is not None
        dlse = torch.where(chunk.labels.target == IGNORED, 0.0, hard)
        if chunk.logits.dtype is not torch.float64:
            # The statistics are float64 if only the teacher's logits are.
            lse, error, dlse = lse.float(), error.float(), dlse.float()
        call = call_of_logits(LOSS_GRADIENT, chunk.logits, label_smoothing=0.0, **self.options)
        upstream = (None, dlse, torch.where(chunk.labels.is_local, -dlse, 0.0))
        arguments = (chunk.labels, (lse, error), upstream, self.shard)
        gradient = gradients(LOSS_GRADIENT, call, *arguments)[0]
        assert gradient is not None
        return gradient

    def _divergence(self, chunk: StudentTeacherChunk) -> Any:
        """Return the chunk's call of `divergence_forward`, where the target IGNORED marks a token
        that does not count."""
        call = self.call
        student, temperature = _capped(call, "student_", chunk.logits, call.temperature)
        teacher, teacher_temperature = _capped(
            call, "teacher_", chunk.teacher, call.teacher_temperature or call.temperature
        )
        target = None if chunk.labels is None else chunk.labels.target
        options = (
            limit(call.kind, call.beta), call.beta, temperature, teacher_temperature, IGNORED
        )  # fmt: skip
        return DIVERGENCE.arguments(student, teacher, target, *options)


def _capped(call: Any, side: str, logits: Tensor, temperature: float) -> tuple[Tensor, float]:
    """Return the logits of student or teacher for a divergence, and their temperature. With a soft
    cap, the logits are capped and scaled, in float32; otherwise the temperature includes their
    scale."""
    softcap, logit_scale = (getattr(call, f"{side}{name}") for name in ("softcap", "logit_scale"))
    if softcap is None:
        return logits, temperature / logit_scale
    return effective(logits, softcap, logit_scale), temperature
