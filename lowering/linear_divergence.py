"""linear_divergence on a device: PyTorch's matrix products, a chunk of tokens at a time, and
between them the row functions of the device's divergence and cross_entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..ops.head import Product, both, factors_of, products_of, still_missing
from ..ops.log_prob import tempered
from ..ops.two_heads import (
    divisor,
    mixed,
    reduced,
    rows_of,
    upstream_of_sum,
    upstream_of_tokens,
    weights_of_tokens,
)
from .cross_entropy import Tokens
from .divergence import Hard, Options, options_of
from .linear_cross_entropy import ChunkedLinear, Gradients, chunked_linear
from .sizes import cdiv
from .tensors import flat

Upstream = tuple[Tensor | None, Tensor | None]
Outputs = tuple[Tensor | None, ...]


class Heads:
    """Both heads of a call, and the kernels between their products."""

    def __init__(
        self, call: Any, divergence: Any, cross_entropy: Any, alignment: int,
        dweight: Tensor | None,
    ) -> None:  # fmt: skip
        self.call = call
        self.divergence, self.cross_entropy = divergence, cross_entropy
        self.target = flat(call.target)
        self.options: Options = options_of(
            call, call.student_softcap, call.teacher_softcap,
            call.student_logit_scale, call.teacher_logit_scale,
        )  # fmt: skip
        caps = (call.student_softcap, call.student_logit_scale)
        self.loss = _cross_entropy(call.ignore_index, *caps)
        ignore_index = -1 if self.target is None else call.ignore_index
        self.tempered = _cross_entropy(ignore_index, *tempered(call.temperature, *caps))
        stride = row_bytes = 0
        if call.teacher_x is not None:
            stride = cdiv(call.teacher_weight.shape[0], alignment) * alignment
            row_bytes = stride * call.teacher_x.itemsize
        self.student = chunked_linear(
            _student(call), call.student_bias,
            dweight, alignment, call.accum_dtype, call.chunk_bytes, row_bytes,
        )  # fmt: skip
        if call.teacher_x is not None:
            self.teacher = ChunkedLinear(
                _teacher(call), call.teacher_bias,
                stride, self.student.slices, call.teacher_x.dtype,
            )  # fmt: skip

    def logits(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each chunk of tokens and both logits, whose memory the next chunk reuses."""
        if self.call.teacher_x is None:
            given = rows_of(self.call.teacher_logits)
            for chunk, student in self.student.logits():
                yield chunk, student, given[chunk]
        else:
            pairs = zip(self.student.logits(), self.teacher.logits(), strict=True)
            for (chunk, student), (_, teacher) in pairs:
                yield chunk, student, teacher

    def gradients(self, outputs: Sequence[Tensor | None]) -> Gradients:
        """The gradients of the student's head, which are written to the op's outputs."""
        return Gradients(self.student.products, outputs, self.student.sum_dtype)

    def values(
        self, chunk: slice, student: Tensor, teacher: Tensor, statistics: Tensor,
        losses: Tensor | None,
    ) -> None:  # fmt: skip
        """Fill the statistics, and the cross-entropy of each token."""
        *results, lse = (row[chunk] for row in statistics)
        target = None if self.target is None else self.target[chunk]
        self.divergence.divergences(self.options, student, teacher, target, results)
        if target is not None and losses is not None:
            tokens = self.tokens(losses, lse.new_empty(losses.shape), statistics[-1]).chunk(chunk)
            self.cross_entropy.loss_and_gradient(self.loss, student, tokens, False)
            lse.masked_fill_(target == self.call.ignore_index, 0.0)

    def entropies(self, chunk: slice, student: Tensor, entropy: Tensor) -> None:
        """Fill the entropy of each token of the chunk."""
        if self.target is None:
            target = torch.zeros_like(entropy, dtype=torch.int64)
        else:
            target = self.target[chunk]
        lse, log_prob = entropy.new_empty(2, *entropy.shape)
        tokens = Tokens(None, target, None, lse=lse, entropy=entropy, log_prob=log_prob)
        self.cross_entropy.loss_and_gradient(self.tempered, student, tokens, False)

    def tokens(self, losses: Tensor, others: Tensor, lse: Tensor) -> Tokens:
        """The tokens of cross_entropy's row functions. `others` takes results that are not used."""
        return Tokens(None, self.target, None, losses, others, lse, others)

    def gradient(
        self, chunk: slice, upstream: Upstream, student: Tensor, teacher: Tensor,
        statistics: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradient of the student's logits over them."""
        *saved, lse = (row[chunk] for row in statistics)
        soft, hard = (None if grad is None else grad[chunk] for grad in upstream)
        if soft is None:
            soft = lse.new_zeros(()).expand(lse.shape)
        target = None if self.target is None else self.target[chunk]
        sharp = (
            None if hard is None else Hard(hard * self.call.temperature, lse, self.call.temperature)
        )
        self.divergence.gradients(
            self.options, soft, student, teacher, target, saved, student, None, sharp
        )


def register(
    device: str, divergence: Any, cross_entropy: Any, scale: Callable[..., None], alignment: int
) -> None:
    """Register the ops with the row functions of the modules `divergence` and `cross_entropy`.

    `scale(gradient, factor, result)` fills result with factor times a gradient that the forward
    computed. Each row of logits starts at a multiple of `alignment` elements.
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


def _cross_entropy(ignore_index: int, softcap: float | None, logit_scale: float) -> Any:
    """The options of cross_entropy's row functions, of each token by itself."""
    return library.OPS["cross_entropy_forward"].arguments(
        None, None,
        ignore_index=ignore_index, reduction="none", softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip


def _student(call: Any) -> list[Product]:
    rows = rows_of(call.student_x)
    return products_of(rows, call.student_weight, call.student_lora_x, call.student_lora_b)


def _teacher(call: Any) -> list[Product]:
    rows = rows_of(call.teacher_x)
    return products_of(rows, call.teacher_weight, call.teacher_lora_x, call.teacher_lora_b)


def _weights(call: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
    """The weight of each token, and the number by which the reduction divides."""
    x = call.student_x
    given = (call.target, call.token_weight, call.ignore_index, x.shape[:-1], dtype, x.device)
    weights = weights_of_tokens(*given)
    return weights, divisor(call.reduction, weights, call.num_items_in_batch)


def _forward(call: Any, kernels: Any) -> tuple[Tensor | None, ...]:
    allocated = library.allocate("linear_divergence_forward", call)
    statistics, computed, entropy = allocated[3], allocated[4:-1], allocated[-1]
    heads = Heads(call, *kernels, computed[1])
    gradients = heads.gradients(computed)
    del allocated, computed
    by_token = statistics.view(statistics.shape[0], -1)
    weights, items = _weights(call, statistics.dtype)
    losses = None
    if call.target is None:
        by_token[-1].zero_()
    else:
        losses = torch.empty_like(weights)
    for chunk, student, teacher in heads.logits():
        heads.values(chunk, student, teacher, by_token, losses)
        if entropy is not None:
            heads.entropies(chunk, student, entropy.view(-1)[chunk])
        if any(call.gradient_mask):
            upstream = upstream_of_sum(weights, call.soft_weight, call.hard_weight)
            heads.gradient(chunk, upstream, student, teacher, by_token)
            gradients.add(chunk, student)
    del student, teacher
    reduction = (weights, items, call.reduction, call.student_x.shape[:-1])
    divergence, cross_entropy = reduced(by_token[0], *reduction), None
    if losses is not None:
        # It is here that a target out of range stops a GPU.
        tokens = heads.tokens(losses, torch.empty_like(losses), by_token[-1])
        total = losses.new_empty(())
        V = call.student_weight.shape[0]
        heads.cross_entropy.reduce(heads.loss, V, tokens, None, None, total)
        cross_entropy = reduced(losses, *reduction)
    loss = mixed(divergence, cross_entropy, call.soft_weight, call.hard_weight)
    return (loss, divergence, cross_entropy, statistics, *gradients.rounded(), entropy)


def _backward(call: Any, kernels: Any, scale: Callable[..., None]) -> Outputs:
    results = library.allocate("linear_divergence_backward", call)
    weights, items = _weights(call, call.statistics.dtype)
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    finished: list[Tensor | None] = [None] * len(computed)
    if call.dloss is not None and any(gradient is not None for gradient in computed):
        factors = factors_of(call.dloss, call.target, call.ignore_index, items)
        for i, (gradient, result) in enumerate(zip(computed, results, strict=True)):
            if gradient is not None and result is not None:
                scale(gradient, factors[i], result)
                finished[i] = result
    if not any(still_missing(call.output_mask, finished)):
        return tuple(finished)
    upstream = upstream_of_tokens(
        call.dloss, call.ddivergence, call.dcross_entropy, call.target, call.ignore_index,
        weights, items, call.soft_weight, call.hard_weight,
    )  # fmt: skip
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    heads = Heads(call, *kernels, unfinished[1])
    gradients = heads.gradients(unfinished)
    del results, unfinished
    by_token = call.statistics.reshape(call.statistics.shape[0], -1).contiguous()
    for chunk, student, teacher in heads.logits():
        heads.gradient(chunk, upstream, student, teacher, by_token)
        gradients.add(chunk, student)
    del student, teacher
    return both(finished, gradients.rounded())
