"""The loss of each token, from the statistics of all words, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.losses.cross_entropy import token_losses, token_weights
from .words import ClassSums, Words


class Tokens(NamedTuple):
    """The tokens of a loss over a sharded vocabulary, each tensor of target's shape."""

    # Counted from the rank's first word, and to be read where `here` is True.
    target: Tensor
    here: Tensor
    # Whether the target is a word or is ignored, and whether it is not ignored.
    valid: Tensor
    within: Tensor
    # The weight of each token, and its product with the weight of its class: 0 if it is ignored.
    weights: Tensor
    counts: Tensor
    # (held,): the weights of the rank's words; and the sum of the weights of each rank's.
    class_weight: Tensor | None
    class_sums: ClassSums

    @staticmethod
    def of_flat(
        parts: Sequence[Tensor], class_weight: Tensor | None, class_sums: ClassSums
    ) -> Tokens:
        target, here, valid, within, weights, counts = parts
        return Tokens(target, here, valid, within, weights, counts, class_weight, class_sums)

    @staticmethod
    def of_words(
        words: Words, target: Tensor, ignore_index: int, class_weight: Tensor | None,
        token_weight: Tensor | None, dtype: torch.dtype,
    ) -> Tokens:  # fmt: skip
        """The tokens of a call, whose targets and class weights are of the whole vocabulary."""
        within = target != ignore_index
        weights, counts = token_weights(target, within, class_weight, token_weight, dtype)
        return Tokens(
            words.local(target, ignore_index), words.here(target),
            words.valid(target, ignore_index), within, weights, counts, words.of(class_weight),
            words.class_sums(class_weight, weights.dtype),
        )  # fmt: skip

    def split(self, size: int) -> list[Tokens]:
        chunks = zip(*(value.split(size) for value in self[:6]), strict=True)
        return [Tokens.of_flat(parts, self.class_weight, self.class_sums) for parts in chunks]

    def flat(self) -> Tokens:
        parts = [value.reshape(-1) for value in self[:6]]
        return Tokens.of_flat(parts, self.class_weight, self.class_sums)


class Terms(NamedTuple):
    """The terms of a loss over V words."""

    label_smoothing: float
    lse_square_scale: float
    V: int


def losses(
    lse: Tensor, nll: Tensor, surprisal: Tensor | None, tokens: Tokens, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Each token's loss and z-loss; surprisal is None without label smoothing."""
    nll = torch.where(tokens.valid, nll, float("nan"))
    smooth = None if surprisal is None else surprisal / terms.V
    return token_losses(
        lse, nll, smooth, tokens.weights, tokens.counts, tokens.within,
        terms.label_smoothing, terms.lse_square_scale,
    )  # fmt: skip


def gradients_of_sum(
    lse: Tensor, tokens: Tokens, terms: Terms, dsum: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of lse, target_logit and total, from that of the sum of the losses."""
    weights, counts = dsum * tokens.weights, dsum * tokens.counts
    hard = (1 - terms.label_smoothing) * counts
    # The lse of an ignored token may be NaN.
    lse = torch.where(tokens.within, lse, 0.0)
    dlse = hard
    if terms.lse_square_scale != 0:
        dlse = hard + 2 * terms.lse_square_scale * counts * lse
    if terms.label_smoothing == 0:
        return dlse, -hard, None
    smoothed = terms.label_smoothing / terms.V * weights
    return dlse + smoothed * sum(tokens.class_sums), -hard, -smoothed
