"""linear_divergence on a device: PyTorch's matrix products, and between them the row functions of
the device's divergence and cross_entropy. A gradient that the forward does not compute is computed
in chunks of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.gradients import BIAS, WEIGHT
from ....ops.heads.head import Head, both, finished_in_forward, rows_of, shaped, still_missing
from ....ops.heads.two_heads import (
    mixed,
    reduced,
    upstream_of_sum,
    upstream_of_tokens,
    weights_and_items,
)
from ..sizes import cdiv
from .chunked_head import ChunkedHead, Device, chunked_tokens, chunked_words
from .two_heads import Rows, Upstream

Outputs = tuple[Tensor | None, ...]


class Heads:
    """Both heads of a call, in chunks of tokens."""

    def __init__(self, call: Any, dweight: Tensor | None, alignment: int) -> None:
        self.given = None if call.teacher_logits is None else rows_of(call.teacher_logits)
        student, row_bytes = Head.of_call(call, "student_"), 0
        if self.given is None:
            teacher = Head.of_call(call, "teacher_")
            row_bytes = cdiv(teacher.weight.shape[0], alignment) * alignment * teacher.x.itemsize
        bounds = (call.accum_dtype, call.chunk_bytes, row_bytes)
        self.student = chunked_tokens(student, dweight, alignment, *bounds)
        if self.given is None:
            self.teacher = self.student._replace(head=teacher)

    def logits(self) -> Iterator[tuple[slice, Head, Tensor, Tensor]]:
        """Yield each chunk of tokens, its part of the student's head, and both logits, whose memory
        the next chunk reuses."""
        if self.given is not None:
            for chunk, head, student in self.student.logits():
                yield chunk, head, student, self.given[chunk]
        else:
            pairs = zip(self.student.logits(), self.teacher.logits(), strict=True)
            for (chunk, head, student), (_, _, teacher) in pairs:
                yield chunk, head, student, teacher


def forward(device: Device, call: Any) -> tuple[Tensor | None, ...]:
    _, _, _, statistics, *computed, entropy = library.allocate("linear_divergence_forward", call)
    rows, heads = Rows(call, device), Heads(call, computed[WEIGHT], device.alignment)
    gradients = heads.student.gradients(computed)
    del computed
    by_token = statistics.view(statistics.shape[0], -1)
    weights, items = weights_and_items(call, statistics.dtype)
    losses = None
    if call.target is None:
        by_token[-2:].zero_()
    else:
        losses = torch.empty_like(weights)
    for chunk, chunk_head, student, teacher in heads.logits():
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
        # It is here that a target out of range stops a GPU.
        tokens = rows.tokens(losses, torch.empty_like(losses), *by_token[-2:])
        total = losses.new_empty(())
        V = call.student_weight.shape[0]
        rows.cross_entropy.reduce(rows.loss, V, tokens, None, None, total)
        cross_entropy = reduced(call, losses, weights, items)
    loss, found = mixed(call, divergence, cross_entropy), shaped(gradients.results(), call)
    return (loss, divergence, cross_entropy, statistics, *found, entropy)


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
    # Without the gradients of weight and bias, those of a chunk of tokens are complete, but for
    # lora_b's, whose sum is smaller than that of x's.
    chunked = _by_words if missing[WEIGHT] or missing[BIAS] else _by_tokens
    return both(finished, chunked(device, call, upstream, unfinished))


def _by_tokens(
    device: Device, call: Any, upstream: Upstream, outputs: list[Tensor | None]
) -> Outputs:
    """The gradients of x, lora_x and lora_b, a chunk of tokens at a time."""
    rows, heads = Rows(call, device), Heads(call, None, device.alignment)
    gradients = heads.student.gradients(outputs)
    outputs.clear()
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for chunk, chunk_head, student, teacher in heads.logits():
        rows.gradient(upstream, student, teacher, by_token, tokens=chunk)
        gradients.add(chunk_head, student)
    del student, teacher
    return shaped(gradients.results(), call)


def _by_words(
    device: Device, call: Any, upstream: Upstream, outputs: list[Tensor | None]
) -> Outputs:
    """Every gradient, a chunk of words at a time: the statistics have each token's sums over all
    words of both."""
    rows, given = Rows(call, device), call.teacher_logits
    # If the kernels need contiguous rows, the columns of the teacher's logits are copied.
    teacher_bytes = (call.teacher_x if given is None else given).itemsize
    bounds = (call.accum_dtype, call.chunk_bytes, teacher_bytes)
    head = chunked_words(Head.of_call(call, "student_"), device.alignment, *bounds)
    gradients = head.gradients(outputs)
    outputs.clear()
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for (words, chunk_head, student), teacher in zip(
        head.logits(), _teacher_of_words(call, head), strict=True
    ):
        rows.gradient(upstream, student, teacher, by_token, first=words.start)
        gradients.add(chunk_head, student)
    del student, teacher
    return shaped(gradients.results(), call)


def _teacher_of_words(call: Any, student: ChunkedHead) -> Iterator[Tensor]:
    """Yield the teacher's logits of each chunk of the student's words, as far as it has them."""
    given = None if call.teacher_logits is None else rows_of(call.teacher_logits)
    W = (call.teacher_weight if given is None else given.t()).shape[0]
    slices = [slice(min(words.start, W), min(words.stop, W)) for words in student.slices]
    if given is not None:
        for words in slices:
            yield given[:, words]
    else:
        head = Head.of_call(call, "teacher_")
        for _, _, logits in student._replace(head=head, slices=slices).logits():
            yield logits
