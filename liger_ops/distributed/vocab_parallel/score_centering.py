"""`linear_score_centering` over a sharded vocabulary: the log-probabilities of the words and their
gradients are those of `log_prob`, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...library import OPS
from ...ops.heads.head import (
    Head,
    divisor,
    finished_in_forward,
    first_given,
    shaped,
    still_missing,
)
from ...ops.heads.linear_score_centering import (
    Tokens,
    as_log_prob,
    gradient_of_words,
    results_of,
)
from ...record import Op
from . import log_prob
from .head import gradients_of, loss_chunk_size, split
from .shard import VocabShard

LOG_PROB, GRADIENT = OPS["log_prob_forward"], OPS["log_prob_backward"]


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the op's results, with an all-gather of K + 4 numbers a token for each chunk."""
    head, tokens, wanted = Head.of_call(call), Tokens.of_call(call), list(call.gradient_mask)
    size = loss_chunk_size(head, shard, wanted, call.chunk_bytes, call.accum_dtype)
    gradients = gradients_of(head, wanted, shard, size, call.accum_dtype, in_forward=True)
    parts, first = [], 0
    for chunk in split(head, size):
        rows = slice(first, first + chunk.x.shape[0])
        values = {"logits": chunk.logits(), "target": tokens.targets[rows]}
        log_p, _, lse, _, _, _, error = log_prob.forward(
            LOG_PROB, as_log_prob(LOG_PROB, call, **values), shard
        )
        assert log_p is not None and lse is not None and error is not None
        coefficients = tokens.sampled.chunk(rows).coefficients(log_p)
        parts.append((log_p, lse, coefficients, error))
        if any(wanted):
            values |= {"lse": lse, "lse_error": error, "entropy": lse, "dlog_prob": coefficients}
            part = as_log_prob(GRADIENT, call, **values, dentropy=None, dlse=None)
            dlogits = log_prob.backward(GRADIENT, part, shard)[0]
            assert dlogits is not None
            gradients.add(chunk, dlogits)
        first = rows.stop
    return *results_of(call, tokens, parts), *shaped(gradients.results(), call)


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the gradients, and the logits again for those that the forward has not computed."""
    done = finished_in_forward(call, divisor(call, call.total_weight))
    missing = still_missing(call.output_mask, done)
    if not any(missing):
        return tuple(done)
    of_words = gradient_of_words(call, missing)
    return first_given(done, log_prob.backward(OPS["linear_log_prob_backward"], of_words, shard))
