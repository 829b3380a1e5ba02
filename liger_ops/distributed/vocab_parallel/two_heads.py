"""A student's head and its teacher, of the rank's words: from a chunk of tokens at a time, the
divergence of the logits, the cross-entropy of labels, and the gradients of the student's head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.losses.cross_entropy import effective
from . import token_divergences, token_statistics
from .chunk_sizes import chunk_size
from .collectives import of_each_rank, start_gather, wait
from .products import Head, HeadGradients
from .token_divergences import Found
from .words import IGNORED, Words

Upstream = tuple[Tensor | None, Tensor | None]


class Side(NamedTuple):
    """The options of one side's logits. The temperature of logits without a cap has their scale."""

    temperature: float
    softcap: float | None
    logit_scale: float

    @property
    def of_divergence(self) -> float:
        return self.temperature / (1.0 if self.softcap is not None else self.logit_scale)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits for a divergence: with a cap, float32 ones."""
        return logits if self.softcap is None else effective(logits, self.softcap, self.logit_scale)

    def of_logits(self, gradient: Tensor, capped: Tensor, dtype: torch.dtype) -> Tensor:
        if self.softcap is None:
            return gradient
        slope = self.logit_scale * (1 - (capped / self.softcap).square())
        return (gradient * slope).to(dtype)


class Options(NamedTuple):
    kind: str
    beta: float
    student: Side
    teacher: Side
    accum_dtype: torch.dtype | None
    chunk_bytes: int | None

    @property
    def of_divergence(self) -> token_divergences.Options:
        """Ignored tokens have the mark of `Words.local`."""
        temperatures = (self.student.of_divergence, self.teacher.of_divergence)
        return token_divergences.Options(self.kind, self.beta, *temperatures, IGNORED)

    @property
    def of_loss(self) -> token_statistics.Options:
        return token_statistics.Options(False, self.student.softcap, self.student.logit_scale)


class Labels(NamedTuple):
    """Each token's target, counted from the rank's first word, to be read where `here` is True, and
    whether it is a word or is ignored."""

    target: Tensor
    here: Tensor
    valid: Tensor

    def of(self, tokens: slice) -> Labels:
        return Labels(*(value[tokens] for value in self))


class Statistics(NamedTuple):
    """Of each token and all words: those of the divergence, and lse, its error and the target's
    surprisal at temperature 1, which are None without labels."""

    found: Found
    lse: Tensor | None
    lse_error: Tensor | None
    nll: Tensor | None

    def flat(self) -> list[Tensor | None]:
        return [*self.found, self.lse, self.lse_error, self.nll]

    @staticmethod
    def of_flat(values: Sequence[Tensor | None]) -> Statistics:
        *found, lse, error, nll = values
        return Statistics(Found(*(value for value in found if value is not None)), lse, error, nll)

    def of(self, tokens: slice) -> Statistics:
        return Statistics.of_flat([None if x is None else x[tokens] for x in self.flat()])


def joined(chunks: Sequence[Statistics]) -> Statistics:
    columns = zip(*(chunk.flat() for chunk in chunks), strict=True)
    return Statistics.of_flat(
        [None if column[0] is None else torch.cat(column) for column in columns]
    )


class Chunk(NamedTuple):
    tokens: slice
    head: Head
    logits: Tensor
    teacher: Tensor
    labels: Labels | None


class TwoHeads:
    def __init__(
        self, student: Head, teacher: Head | Tensor, labels: Labels | None,
        words: Words, options: Options,
    ) -> None:  # fmt: skip
        self.student, self.teacher, self.labels = student, teacher, labels
        self.words, self.options = words, options
        item_bytes = student.rows.element_size()
        if isinstance(teacher, Head):
            item_bytes += teacher.rows.element_size()
        self.size = chunk_size(words.most * item_bytes, options.chunk_bytes)

    def chunks(self) -> Iterator[Chunk]:
        heads = self.student.split(self.size)
        teachers = self.teacher.split(self.size)
        first = 0
        for head, teacher in zip(heads, teachers, strict=True):
            tokens = slice(first, first + head.rows.shape[0])
            first = tokens.stop
            taught = teacher.logits() if isinstance(teacher, Head) else teacher
            labels = None if self.labels is None else self.labels.of(tokens)
            yield Chunk(tokens, head, head.logits(), taught, labels)

    def with_statistics(self) -> Iterator[tuple[Chunk, Statistics]]:
        """Yield each chunk and its statistics, which are gathered while the logits of the next one
        are computed."""
        last = None
        for chunk in self.chunks():
            gathering = start_gather(self._local(chunk), 0, self.words.group)
            if last is not None:
                yield last[0], self._of_all_ranks(*last)
            last = chunk, gathering
        assert last is not None
        yield last[0], self._of_all_ranks(*last)

    def _local(self, chunk: Chunk) -> Tensor:
        target = None if chunk.labels is None else chunk.labels.target
        parts = token_divergences.local_statistics(
            self.options.student.capped(chunk.logits), self.options.teacher.capped(chunk.teacher),
            target, self.options.of_divergence,
        )  # fmt: skip
        if chunk.labels is None:
            return parts
        logits = token_statistics.of_logits(chunk.logits)
        of_loss = token_statistics.local_statistics(
            logits, chunk.labels.target, chunk.labels.here, None, self.words, self.options.of_loss
        )
        return torch.cat([parts, of_loss.to(parts.dtype)])

    def _of_all_ranks(self, chunk: Chunk, gathering: Tensor) -> Statistics:
        ranks = of_each_rank(wait(gathering), gathering.shape[0] // self.words.ranks)
        lse = error = nll = target = None
        if chunk.labels is not None:
            target = chunk.labels.target
            of_loss = ranks[:, -3:].flatten(0, 1)
            *of_labels, _ = token_statistics.of_all_ranks(of_loss, ranks[0, -3:], ())
            # The op has no numbers of ignored tokens.
            lse, error, nll = (x.masked_fill(target == IGNORED, 0.0) for x in of_labels)
            nll = torch.where(chunk.labels.valid, nll, float("nan"))
            ranks = ranks[:, :-3]
        found = token_divergences.of_all_ranks(
            ranks.flatten(0, 1),
            self.options.student.capped(chunk.logits), self.options.teacher.capped(chunk.teacher),
            target, self.words.group, self.options.of_divergence,
        )  # fmt: skip
        return Statistics(found, lse, error, nll)

    def dlogits(self, chunk: Chunk, statistics: Statistics, upstream: Upstream) -> Tensor:
        """The gradient of the chunk's logits, from those of every token's divergence and
        cross-entropy."""
        soft, hard = (None if grad is None else grad[chunk.tokens] for grad in upstream)
        student, total = self.options.student, None
        if soft is not None:
            target = None if chunk.labels is None else chunk.labels.target
            capped = student.capped(chunk.logits)
            gradient, _ = token_divergences.gradients(
                soft, capped, self.options.teacher.capped(chunk.teacher), target,
                statistics.found, self.options.of_divergence, [True, False],
            )  # fmt: skip
            assert gradient is not None
            total = student.of_logits(gradient, capped, chunk.logits.dtype)
        if hard is not None:
            assert chunk.labels is not None
            assert statistics.lse is not None and statistics.lse_error is not None
            target, here, _ = chunk.labels
            lse, error = statistics.lse, statistics.lse_error
            dlse = torch.where(target == IGNORED, 0.0, hard)
            if chunk.logits.dtype is not torch.float64:
                # They are float64 if the teacher's logits alone are.
                lse, error, dlse = lse.float(), error.float(), dlse.float()
            of_loss = token_statistics.upstream_here(dlse, -dlse, None, here, None, self.words)
            part = token_statistics.gradients(
                token_statistics.of_logits(chunk.logits), target, None, (lse, error), of_loss,
                self.words, self.options.of_loss, [True, False, False, False, False],
            )[0]  # fmt: skip
            assert part is not None
            total = part if total is None else total + part
        return torch.zeros_like(chunk.logits) if total is None else total

    def gradients(self, wanted: list[bool], sums_x: bool, in_forward: bool) -> HeadGradients:
        group = self.words.group if sums_x else None
        accum_dtype = self.options.accum_dtype
        return HeadGradients(self.student, wanted, group, self.size, accum_dtype, in_forward)
