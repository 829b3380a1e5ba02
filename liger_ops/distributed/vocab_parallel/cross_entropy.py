"""`cross_entropy` and `linear_cross_entropy` over a sharded vocabulary: the ops' results for all
words, and the gradients of the rank's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...library import OPS
from ...ops.heads.head import (
    GRADIENTS,
    HEAD,
    Head,
    divisor,
    finished_in_forward,
    first_given,
    shaped,
    still_missing,
)
from ...ops.losses.cross_entropy import reduced, upstream
from ...record import Op
from .head import gradients_of, loss_chunk_size, split
from .shard import VocabShard, gathered, start_gather, wait
from .token_losses import (
    ShardTokens,
    TokenStatistics,
    call_of_logits,
    combine_ranks,
    dlse_of_z_loss,
    gradients,
    local_statistics,
    losses,
    upstream_of_shard,
)

LOSS, GRADIENT = OPS["cross_entropy_forward"], OPS["cross_entropy_backward"]


def forward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the op's results. The all-gather has three or four numbers a token, and is one for
    all tokens, or one for each chunk if the forward computes gradients."""
    tokens = ShardTokens.of_call(call, shard)
    computed: tuple[Tensor | None, ...] = ()
    if hasattr(call, "x") and any(call.gradient_mask):
        chunked = ChunkedLoss(call, tokens, shard)
        statistics = chunked.statistics()
        computed = shaped(chunked.gradients.results(), call)
    else:
        local = local_statistics(op, call, tokens, shard)
        ranks = gathered(local, 0, shard.group)
        statistics = combine_ranks(ranks, local.shape[0], tokens.class_sums)
        if hasattr(call, "x"):
            computed = (None,) * len(HEAD)
    lse, error, nll, _ = statistics
    loss, z_loss = losses(statistics, tokens, call, shard.V)
    target_logit = torch.where(tokens.within, (lse - nll) + error, 0.0)
    total_weight = tokens.counts.sum()
    loss, z_loss = reduced(loss, z_loss, total_weight, call.num_items_in_batch, call.reduction)
    return loss, z_loss, lse, target_logit, total_weight, None, None, error, *computed


def backward(op: Op, call: Any, shard: VocabShard) -> tuple[Tensor | None, ...]:
    """Compute the gradients, and the logits again for those that the forward has not computed."""
    if not hasattr(call, "x"):
        tokens = ShardTokens.of_call(call, shard)
        lse = call.lse, call.lse_error
        return gradients(op, call, tokens, lse, _upstream(call, tokens, shard), shard)
    done = finished_in_forward(call, divisor(call, call.total_weight))
    missing = still_missing(call.output_mask, done)
    if not any(missing):
        return tuple(done)
    tokens = ShardTokens.of_call(call, shard)
    computed = gradients(
        op, call, tokens, (call.lse, call.lse_error), _upstream(call, tokens, shard), shard,
        output_mask=missing, **dict.fromkeys(GRADIENTS.split()),
    )  # fmt: skip
    return first_given(done, computed)


def _upstream(call: Any, tokens: ShardTokens, shard: VocabShard) -> Any:
    """Compute the gradients of the results that the op has for the rank's words."""
    lse, within = call.lse, tokens.within
    per_token = (upstream(grad, call) for grad in (call.dloss, call.dz_loss))
    # For a mean over no tokens the divisor is 0, and the gradient NaN: replace it.
    dloss, dz_loss = (
        None if grad is None else torch.where(within, grad.to(lse.dtype), 0.0) for grad in per_token
    )
    dlses, dtarget_logit = [], None
    if dz_loss is not None:
        dlses += dlse_of_z_loss(call, tokens, lse, dz_loss, tokens.counts)
    if call.dlse is not None:
        dlses.append(call.dlse.to(lse.dtype))
    if call.dtarget_logit is not None:
        dtarget_logit = torch.where(within, call.dtarget_logit, 0.0)
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    return upstream_of_shard(lse, tokens, call, shard, dloss, dlses, dtarget_logit)


class GatheringChunk(NamedTuple):
    """A chunk of tokens, the all-gather of whose statistics was started."""

    head: Head
    tokens: ShardTokens
    # A list, so that the last reader pops the logits, and they are freed while the chunk lives.
    logits: list[Tensor]
    # The statistics of all ranks' words, for which `wait` waits, and their number for a token.
    gathering: Tensor
    numbers: int


class ChunkedLoss:
    """The gradients of the summed loss of a head and the statistics of its tokens, computed a chunk
    of tokens at a time: the rank's logits, the all-gather of their statistics, the gradient of the
    logits, and its products with weight and x.

    The logits of the next chunk are computed while the statistics are gathered, and the gradient
    of weight while that of x is summed over the ranks.
    """

    def __init__(self, call: Any, tokens: ShardTokens, shard: VocabShard) -> None:
        self.call, self.shard = call, shard
        names = ("label_smoothing", "softcap", "logit_scale")
        self.options = {name: getattr(call, name) for name in names}
        self.head, wanted = Head.of_call(call), list(call.gradient_mask)
        self.size = loss_chunk_size(self.head, shard, wanted, call.chunk_bytes, call.accum_dtype)
        self.tokens = tokens.split(self.size)
        arguments = (self.head, wanted, shard, self.size, call.accum_dtype)
        self.gradients = gradients_of(*arguments, in_forward=True)

    def statistics(self) -> TokenStatistics:
        """Compute the statistics of all tokens, and complete `self.gradients`."""
        columns: Any = zip(*(self.finished(chunk) for chunk in self.chunks()), strict=True)
        shape = self.call.target.shape
        whole = (None if x[0] is None else torch.cat(x).reshape(shape) for x in columns)
        return TokenStatistics(*whole)  # type: ignore[arg-type]

    def chunks(self) -> Iterator[GatheringChunk]:
        """Yield each chunk of tokens after the logits of the next one were computed, during which
        its statistics were gathered."""
        last = None
        for head, tokens in zip(split(self.head, self.size), self.tokens, strict=True):
            logits = head.logits()
            local = local_statistics(
                LOSS, call_of_logits(LOSS, logits, **self.options), tokens, self.shard
            )
            gathering = start_gather(local, 0, self.shard.group)
            if last is not None:
                yield last
            last = GatheringChunk(head, tokens, [logits], gathering, local.shape[0])
            del logits
        assert last is not None
        yield last

    def finished(self, chunk: GatheringChunk) -> TokenStatistics:
        """Add the gradients of a chunk to `self.gradients`, and return its statistics."""
        tokens = chunk.tokens
        statistics = combine_ranks(wait(chunk.gathering), chunk.numbers, tokens.class_sums)
        upstream = upstream_of_shard(statistics.lse, tokens, self.call, self.shard)
        # Popped, so that the logits are freed before the products of their gradient.
        dlogits = gradients(
            GRADIENT, call_of_logits(GRADIENT, chunk.logits.pop(), **self.options), tokens,
            (statistics.lse, statistics.lse_error), upstream, self.shard,
        )[0]  # fmt: skip
        assert dlogits is not None
        self.gradients.add(chunk.head, dlogits)
        return statistics
