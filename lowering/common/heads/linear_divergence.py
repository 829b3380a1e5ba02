"""linear_divergence on a device: PyTorch's matrix products, and between them the row functions of
the device's divergence and cross_entropy. A gradient that the forward does not compute is computed
in chunks of words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.head import Head, both, finished_in_forward, rows_of, shaped, still_missing
from ....ops.heads.two_heads import (
    divisor,
    mixed,
    reduced,
    upstream_of_sum,
    upstream_of_tokens,
    weights_of_tokens,
)
from ..sizes import cdiv
from .chunked_head import ChunkedHead, chunked_tokens, chunked_words, head_tensors
from .two_heads import Rows, Upstream

Outputs = tuple[Tensor | None, ...]


class Heads:
    """Both heads of a call, in chunks of tokens."""

    def __init__(self, call: Any, dweight: Tensor | None, alignment: int) -> None:
        self.given = None if call.teacher_logits is None else rows_of(call.teacher_logits)
        self.tensors = head_tensors(call, "student_")
        student, row_bytes = Head.of(*self.tensors), 0
        if self.given is None:
            teacher = Head.of(*head_tensors(call, "teacher_"))
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


def register(
    device: str, divergence: Any, cross_entropy: Any, scale: Callable[..., None], alignment: int
) -> None:
    """Register the ops with the row functions of the modules `divergence` and `cross_entropy`.

    `scale` is the device's own: see `scaling`. Each row of logits starts at a multiple of
    `alignment` elements.
    """
    kernels = (divergence, cross_entropy, alignment)
    module = divergence.__name__

    # allocates=True, so that the output of a gradient is not in memory beside its wider sum.
    @library.kernel("linear_divergence_forward", device, allocates=True, module=module)
    def linear_divergence_forward(call):
        return _forward(call, kernels)

    @library.kernel("linear_divergence_backward", device, allocates=True, module=module)
    def linear_divergence_backward(call):
        return _backward(call, kernels, scale)


def _weights(call: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
    """The weight of each token, and the number by which the reduction divides."""
    x = call.student_x
    given = (call.target, call.token_weight, call.ignore_index, x.shape[:-1], dtype, x.device)
    weights = weights_of_tokens(*given)
    return weights, divisor(call.reduction, weights, call.num_items_in_batch)


def _forward(call: Any, kernels: Any) -> tuple[Tensor | None, ...]:
    allocated = library.allocate("linear_divergence_forward", call)
    statistics, computed, entropy = allocated[3], allocated[4:-1], allocated[-1]
    divergence, cross_entropy, alignment = kernels
    rows, heads = Rows(call, divergence, cross_entropy), Heads(call, computed[1], alignment)
    gradients = heads.student.gradients(computed)
    del allocated, computed
    by_token = statistics.view(statistics.shape[0], -1)
    weights, items = _weights(call, statistics.dtype)
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
            upstream = upstream_of_sum(weights, call.soft_weight, call.hard_weight)
            rows.gradient(upstream, student, teacher, by_token, tokens=chunk)
            gradients.add(chunk_head, student)
    del student, teacher
    reduction = (weights, items, call.reduction, call.student_x.shape[:-1])
    divergence, cross_entropy = reduced(by_token[0], *reduction), None
    if losses is not None:
        # It is here that a target out of range stops a GPU.
        tokens = rows.tokens(losses, torch.empty_like(losses), *by_token[-2:])
        total = losses.new_empty(())
        V = call.student_weight.shape[0]
        rows.cross_entropy.reduce(rows.loss, V, tokens, None, None, total)
        cross_entropy = reduced(losses, *reduction)
    loss = mixed(divergence, cross_entropy, call.soft_weight, call.hard_weight)
    found = shaped(gradients.results(), heads.tensors)
    return (loss, divergence, cross_entropy, statistics, *found, entropy)


def _backward(call: Any, kernels: Any, scale: Callable[..., None]) -> Outputs:
    results = library.allocate("linear_divergence_backward", call)
    weights, items = _weights(call, call.statistics.dtype)
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    finished = finished_in_forward(
        call.dloss, computed, call.output_mask, call.target, call.ignore_index, items,
        call.student_x.dtype, results, scale,
    )  # fmt: skip
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    upstream = upstream_of_tokens(
        call.dloss, call.ddivergence, call.dcross_entropy, call.target, call.ignore_index,
        weights, items, call.soft_weight, call.hard_weight,
    )  # fmt: skip
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    del results
    # Without the gradients of weight and bias, those of a chunk of tokens are complete, but for
    # lora_b's, whose sum is smaller than that of x's.
    backward = _by_words if any(missing[1:3]) else _by_tokens
    return both(finished, backward(call, kernels, upstream, unfinished))


def _by_tokens(
    call: Any, kernels: Any, upstream: Upstream, outputs: list[Tensor | None]
) -> Outputs:
    """The gradients of x, lora_x and lora_b, a chunk of tokens at a time."""
    divergence, cross_entropy, alignment = kernels
    rows, heads = Rows(call, divergence, cross_entropy), Heads(call, None, alignment)
    gradients = heads.student.gradients(outputs)
    outputs.clear()
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for chunk, chunk_head, student, teacher in heads.logits():
        rows.gradient(upstream, student, teacher, by_token, tokens=chunk)
        gradients.add(chunk_head, student)
    del student, teacher
    return shaped(gradients.results(), heads.tensors)


def _by_words(call: Any, kernels: Any, upstream: Upstream, outputs: list[Tensor | None]) -> Outputs:
    """Every gradient, a chunk of words at a time: the statistics have each token's sums over all
    words of both."""
    divergence, cross_entropy, alignment = kernels
    rows, given = Rows(call, divergence, cross_entropy), call.teacher_logits
    # If the kernels need contiguous rows, the columns of the teacher's logits are copied.
    teacher_bytes = (call.teacher_x if given is None else given).itemsize
    tensors = head_tensors(call, "student_")
    bounds = (call.accum_dtype, call.chunk_bytes, teacher_bytes)
    head = chunked_words(Head.of(*tensors), alignment, *bounds)
    gradients = head.gradients(outputs)
    outputs.clear()
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for (words, chunk_head, student), teacher in zip(
        head.logits(), _teacher_of_words(call, head), strict=True
    ):
        rows.gradient(upstream, student, teacher, by_token, first=words.start)
        gradients.add(chunk_head, student)
    del student, teacher
    return shaped(gradients.results(), tensors)


def _teacher_of_words(call: Any, student: ChunkedHead) -> Iterator[Tensor]:
    """Yield the teacher's logits of each chunk of the student's words, as far as it has them."""
    given = None if call.teacher_logits is None else rows_of(call.teacher_logits)
    W = (call.teacher_weight if given is None else given.t()).shape[0]
    slices = [slice(min(words.start, W), min(words.stop, W)) for words in student.slices]
    if given is not None:
        for words in slices:
            yield given[:, words]
    else:
        head = Head.of(*head_tensors(call, "teacher_"))
        for _, _, logits in student._replace(head=head, slices=slices).logits():
            yield logits
