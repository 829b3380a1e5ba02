"""linear_divergence on a device: PyTorch's matrix products, and between them the row functions of
the device's divergence and cross_entropy. The backward computes the gradients that the forward did
not: in chunks of words if weight or bias is among them, else in chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.gradients import BIAS, WEIGHT
from ....ops.heads.head import (
    Head,
    finished_in_forward,
    first_given,
    rows_of,
    shaped,
    still_missing,
)
from ....ops.heads.two_heads import (
    mixed,
    reduced,
    upstream_of_sum,
    upstream_of_tokens,
    weights_and_items,
)
from ....ops.losses.log_prob import tempered
from ..losses.cross_entropy import TokenTensors, loss_of_tokens
from ..losses.divergence import DivergenceOptions, Hard, options_of
from ..tensors import cdiv, flat
from .chunked_head import ChunkedHead, Device, chunked_tokens, chunked_words

Upstream = tuple[Tensor | None, Tensor | None]
ALL = slice(None)


class RowFunctions:
    """The row functions of a device's divergence and cross_entropy, with a call's options.

    `loss` are the options of the cross-entropy of the labels, `tempered` those of the entropy,
    which has the divergence's temperature.
    """

    def __init__(self, call: Any, device: Device) -> None:
        self.divergence, self.cross_entropy = device.divergence, device.cross_entropy
        self.target, self.temperature = flat(call.target), call.temperature
        caps = (call.student_softcap, call.student_logit_scale)
        self.options: DivergenceOptions = options_of(
            call, call.student_softcap, call.teacher_softcap,
            call.student_logit_scale, call.teacher_logit_scale,
        )  # fmt: skip
        self.loss = loss_of_tokens(call.ignore_index, *caps)
        # Without labels, `entropies` passes targets of 0, none of which is to be ignored.
        ignore_index = -1 if self.target is None else call.ignore_index
        self.tempered = loss_of_tokens(ignore_index, *tempered(call.temperature, *caps))

    def values(
        self, chunk: slice, student: Tensor, teacher: Tensor, statistics: Tensor,
        losses: Tensor | None,
    ) -> None:  # fmt: skip
        """Fill the statistics of the chunk's tokens and, with labels, each token's
        cross-entropy."""
        *results, lse, error = (row[chunk] for row in statistics)
        target = None if self.target is None else self.target[chunk]
        self.divergence.divergences(self.options, student, teacher, target, results)
        if target is not None and losses is not None:
            tokens = self.tokens(losses, torch.empty_like(losses), *statistics[-2:]).chunk(chunk)
            self.cross_entropy.loss_and_gradient(self.loss, student, tokens, False)
            # As the divergence's statistics are: an ignored token's logits may be NaN.
            for statistic in (lse, error):
                statistic.masked_fill_(target == self.options.ignore_index, 0.0)

    def entropies(self, chunk: slice, student: Tensor, entropy: Tensor) -> None:
        """Fill the entropy of each token of the chunk."""
        if self.target is None:
            target = torch.zeros_like(entropy, dtype=torch.int64)
        else:
            target = self.target[chunk]
        lse, log_prob = entropy.new_empty(2, *entropy.shape)
        tokens = TokenTensors(None, target, None, lse=lse, entropy=entropy, log_prob=log_prob)
        self.cross_entropy.loss_and_gradient(self.tempered, student, tokens, False)

    def tokens(self, losses: Tensor, others: Tensor, lse: Tensor, error: Tensor) -> TokenTensors:
        """Return the tensors of cross_entropy's row functions. `others` takes results that are not
        used."""
        return TokenTensors(None, self.target, None, losses, others, lse, others, lse_error=error)

    def gradient(
        self, upstream: Upstream, student: Tensor, teacher: Tensor, statistics: Tensor,
        tokens: slice = ALL, first: int = 0,
    ) -> None:  # fmt: skip
        """Write the gradient of the student's logits over them.

        The logits are those of `tokens`, and of the words from `first` on.
        """
        *saved, lse, error = (row[tokens] for row in statistics)
        soft, hard = (None if grad is None else grad[tokens] for grad in upstream)
        if soft is None:
            soft = lse.new_zeros(()).expand(lse.shape)
        labels = None
        if hard is not None:
            # The divergence's logits are divided by the temperature, and so is what the kernel
            # makes of a gradient: the labels' is multiplied by it.
            scale = self.temperature
            if self.options.student_softcap is None:
                scale = self.loss.logit_scale
            labels = Hard(hard * self.temperature, lse, error, scale)
        target, options = self.target, self.options
        if target is not None:
            # A target that is not among the words has no column.
            target = target[tokens] - first
            options = options._replace(ignore_index=options.ignore_index - first)
        self.divergence.gradients(
            options, soft, student, teacher, target, saved, student, None, labels
        )


Outputs = tuple[Tensor | None, ...]
# The tokens or words of a chunk, its part of the student's head, and the student's and the
# teacher's logits, whose memory the next chunk reuses.
Chunk = tuple[slice, Head, Tensor, Tensor]


def heads_of_tokens(
    call: Any, dweight: Tensor | None, alignment: int
) -> tuple[ChunkedHead, Iterator[Chunk]]:
    """Return the student's head in chunks of tokens, and an iterator over the chunks."""
    teacher_logits, row_bytes = call.teacher_logits, 0
    if teacher_logits is None:
        head = Head.of_call(call, "teacher_")
        row_bytes = cdiv(head.weight.shape[0], alignment) * alignment * head.x.itemsize
    bounds = (call.accum_dtype, call.chunk_bytes, row_bytes)
    student = chunked_tokens(Head.of_call(call, "student_"), dweight, alignment, *bounds)
    if teacher_logits is not None:
        rows = rows_of(teacher_logits)
        return student, ((*chunk, rows[chunk[0]]) for chunk in student.logits())
    teacher = student._replace(head=head)
    pairs = zip(student.logits(), teacher.logits(), strict=True)
    return student, ((*chunk, logits) for chunk, (_, _, logits) in pairs)


def heads_of_words(call: Any, alignment: int) -> tuple[ChunkedHead, Iterator[Chunk]]:
    """Return the student's head in chunks of words, and an iterator over the chunks."""
    teacher_logits = call.teacher_logits
    # If the kernels need contiguous rows, the columns of the teacher's logits are copied: they take
    # memory in either case.
    teacher_bytes = (call.teacher_x if teacher_logits is None else teacher_logits).itemsize
    bounds = (call.accum_dtype, call.chunk_bytes, teacher_bytes)
    student = chunked_words(Head.of_call(call, "student_"), alignment, *bounds)
    pairs = zip(student.logits(), _teacher_of_words(call, student), strict=True)
    return student, ((*chunk, logits) for chunk, logits in pairs)


def forward(device: Device, call: Any) -> tuple[Tensor | None, ...]:
    _, _, _, statistics, *computed, entropy = library.allocate("linear_divergence_forward", call)
    head, chunks = heads_of_tokens(call, computed[WEIGHT], device.alignment)
    rows, gradients = RowFunctions(call, device), head.gradients(computed)
    del computed
    by_token = statistics.view(statistics.shape[0], -1)
    weights, items = weights_and_items(call, statistics.dtype)
    losses = None
    if call.target is None:
        by_token[-2:].zero_()
    else:
        losses = torch.empty_like(weights)
    for chunk, chunk_head, student, teacher in chunks:
        rows.values(chunk, student, teacher, by_token, losses)
        if entropy is not None:
            rows.entropies(chunk, student, entropy.view(-1)[chunk])
        if any(call.gradient_mask):
            upstream = upstream_of_sum(call, weights)
            rows.gradient(upstream, student, teacher, by_token, tokens=chunk)
            gradients.add(chunk_head, student)
    del student, teacher
    divergence, cross_entropy = reduced(call, by_token[0], weights, items), None
    if losses is not None:
        # The reduction's kernel also checks the targets: one out of range stops a GPU here.
        tokens = rows.tokens(losses, torch.empty_like(losses), *by_token[-2:])
        total = losses.new_empty(())
        V = call.student_weight.shape[0]
        rows.cross_entropy.reduce(rows.loss, V, tokens, None, None, total)
        cross_entropy = reduced(call, losses, weights, items)
    loss, results = mixed(call, divergence, cross_entropy), shaped(gradients.results(), call)
    return (loss, divergence, cross_entropy, statistics, *results, entropy)


def backward(device: Device, call: Any) -> Outputs:
    results = library.allocate("linear_divergence_backward", call)
    weights, items = weights_and_items(call, call.statistics.dtype)
    finished = finished_in_forward(call, items, results, device.scale)
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    upstream = upstream_of_tokens(call, weights, items)
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    del results
    # The gradients of weight and bias are complete in a chunk of words, and that of x is a sum over
    # the chunks; in chunks of tokens it is the other way round. lora_b's gradient is a sum over
    # chunks of tokens, which is smaller than that of x's over chunks of words. A chunk of words
    # needs no other words: the statistics have each token's sums over all words of both heads.
    by_words = missing[WEIGHT] or missing[BIAS]
    if by_words:
        head, chunks = heads_of_words(call, device.alignment)
    else:
        head, chunks = heads_of_tokens(call, None, device.alignment)
    rows, gradients = RowFunctions(call, device), head.gradients(unfinished)
    del unfinished
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for chunk, chunk_head, student, teacher in chunks:
        where = {"first": chunk.start} if by_words else {"tokens": chunk}
        rows.gradient(upstream, student, teacher, by_token, **where)
        gradients.add(chunk_head, student)
    del student, teacher
    return first_given(finished, shaped(gradients.results(), call))


def _teacher_of_words(call: Any, student: ChunkedHead) -> Iterator[Tensor]:
    """Yield the teacher's logits of each chunk of the student's words. The teacher may have fewer
    words: its chunks are then cut off, and may be empty."""
    teacher_logits = None if call.teacher_logits is None else rows_of(call.teacher_logits)
    W = (call.teacher_weight if teacher_logits is None else teacher_logits.t()).shape[0]
    slices = [slice(min(words.start, W), min(words.stop, W)) for words in student.slices]
    if teacher_logits is not None:
        for words in slices:
            yield teacher_logits[:, words]
    else:
        head = Head.of_call(call, "teacher_")
        for _, _, logits in student._replace(head=head, slices=slices).logits():
            yield logits
