"""The row functions of linear_divergence, which take the logits of the student's and the teacher's
head: those of a device's divergence and cross_entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.losses.log_prob import tempered
from ..losses.cross_entropy import TokenTensors, loss_of_tokens
from ..losses.divergence import DivergenceOptions, Hard, options_of
from ..tensors import flat
from .chunked_head import Device

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
