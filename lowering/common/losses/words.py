"""The logits of K words of each token, and their gradients, beside the row functions of
cross_entropy, which take one target a token.

The words are few, and PyTorch's gather and scatter read and write their logits. No element is
written twice with different values, and no sum depends on an order that is not fixed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import library
from ....ops.losses.cross_entropy import effective
from ....ops.losses.log_prob import dlogits_of
from ..tensors import flat
from .cross_entropy import IGNORED, TokenTensors


def any_word(words: Tensor) -> Tensor:
    """Return a target for each token of `words`, (M, K): IGNORED for a token without a word, which
    is negative, else 0. Only whether it is IGNORED matters."""
    return torch.where((words >= 0).any(-1), 0, IGNORED)


def word_logits(loss: Any, logits: Tensor, words: Tensor) -> Tensor:
    """Return the scaled and capped logits of the words, (M, K); NaN for a word that is V or more,
    and any logit for a negative one."""
    V = logits.shape[1]
    listed = effective(logits.gather(1, words.clamp(0, V - 1)), loss.softcap, loss.logit_scale)
    # The clamped index is in bounds, and the NaN makes a wrong one visible.
    return torch.where(words < V, listed, float("nan"))


def word_log_probs(loss: Any, logits: Tensor, words: Tensor, tokens: TokenTensors) -> Tensor:
    """Return the log-probabilities of the words, (M, K), from lse of the tokens; 0 for a negative
    word."""
    return log_probs_of(word_logits(loss, logits, words), words, tokens)


def log_probs_of(listed: Tensor, words: Tensor, tokens: TokenTensors) -> Tensor:
    """Return the log-probabilities of the words from their logits, as `word_logits` returns them,
    and lse of the tokens; 0 for a negative word."""
    assert tokens.lse is not None and tokens.lse_error is not None
    log_p = (listed - tokens.lse.unsqueeze(-1)) - tokens.lse_error.unsqueeze(-1)
    return torch.where(words < 0, 0.0, log_p)


class WordGradients(NamedTuple):
    """The gradients of the log-probabilities of each token's words.

    words and sums are (M, K): each word once in its row, with the sum of the gradients of all its
    entries, and -1 in place of the others. dlse, (M,) or None, dentropy and `tokens` are those of
    the backward's call.
    """

    call: Any
    words: Tensor
    sums: Tensor
    dlse: Tensor | None
    dentropy: Tensor | None
    tokens: TokenTensors

    @staticmethod
    def of_call(call: Any, words: Tensor, tokens: TokenTensors) -> WordGradients:
        """Add up the gradients of equal words. Negative words have none."""
        dlse = flat(call.dlse)
        if dlse is not None:
            dlse = dlse.masked_fill(tokens.target == IGNORED, 0.0)
        grads = torch.zeros_like(words, dtype=call.lse.dtype)
        if call.dlog_prob is not None:
            grads = torch.where(words < 0, 0.0, call.dlog_prob.reshape(words.shape))
        # Equal words become neighbours, in the order of their entries.
        words, order = words.sort(dim=-1, stable=True)
        sums, step = grads.gather(1, order), 1
        # Each sum is that of the entry and of up to step - 1 equal ones before it.
        while step < words.shape[1]:
            same = words[:, step:] == words[:, :-step]
            more = sums[:, step:] + torch.where(same, sums[:, :-step], 0.0)
            sums, step = torch.cat([sums[:, :step], more], -1), 2 * step
        repeated = words[:, 1:] == words[:, :-1]
        repeated = torch.nn.functional.pad(repeated, (0, 1), value=False)
        words, sums = words.masked_fill(repeated, -1), sums.masked_fill(repeated, 0.0)
        return WordGradients(call, words, sums, dlse, flat(call.dentropy), tokens)

    def of_tokens(self, tokens: slice) -> list[Tensor | None]:
        """Return the gradients that the row function takes: of lse, less those that the words'
        log-probabilities add, and of the entropy."""
        dlse = -self.sums[tokens].sum(-1)
        dlse = dlse if self.dlse is None else self.dlse[tokens] + dlse
        dentropy = None if self.dentropy is None else self.dentropy[tokens]
        return [None, None, dlse, None, dentropy]

    def of_logits(self, logits: Tensor, tokens: slice, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the columns of some tokens' words in their logits, of which the first column is
        word `first`, and the whole gradients of these logits, both (M, K)."""
        columns, sums = self.words[tokens] - first, self.sums[tokens]
        of_tokens, call = self.tokens.chunk(tokens), self.call
        # The k-th of these classes is the k-th word.
        listed = library.OPS["log_prob_backward"].arguments(
            None,
            None if self.dentropy is None else self.dentropy[tokens],
            None if self.dlse is None else self.dlse[tokens],
            logits.gather(1, columns.clamp(0, logits.shape[1] - 1)), of_tokens.target,
            of_tokens.entropy, of_tokens.lse, of_tokens.lse_error,
            call.temperature, call.softcap, call.logit_scale, IGNORED,
        )  # fmt: skip
        return columns, dlogits_of(listed, lambda p: sums - p * sums.sum(-1, keepdim=True))


def place(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write values over the logits in these columns, both (M, K), leaving out columns that the
    logits lack. The columns of a row differ from each other, so that no element is written twice
    with different values."""
    Places.of_columns(columns, logits.shape[1]).write(logits, values)


class Places(NamedTuple):
    """The places of values in the rows of logits, which several calls may share.

    An entry that is not inside cannot be left out of a scatter, and a mask would make its size
    depend on the data. Instead it writes what the row's first entry inside writes or, without one,
    what column 0 holds already.
    """

    columns: Tensor
    inside: Tensor
    first: Tensor
    exists: Tensor

    @staticmethod
    def of_columns(columns: Tensor, V: int) -> Places:
        inside = (columns >= 0) & (columns < V)
        first = inside.int().argmax(-1, keepdim=True)
        exists = inside.gather(1, first)
        column = torch.where(exists, columns.gather(1, first), 0)
        return Places(torch.where(inside, columns, column), inside, first, exists)

    def chunk(self, tokens: slice) -> Places:
        return Places(*(x[tokens] for x in self))

    def write(self, logits: Tensor, values: Tensor) -> None:
        values = values.to(logits.dtype)
        value = torch.where(self.exists, values.gather(1, self.first), logits[:, :1])
        logits.scatter_(1, self.columns, torch.where(self.inside, values, value))
