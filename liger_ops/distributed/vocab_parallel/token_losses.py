"""The cross-entropy of each token, from the numbers of all ranks' words, and its gradient.

A call is that of an op, `cross_entropy_forward` and the like, with the rank's words in place of
all: its logits, or its weight and bias. Its targets and class weights are those of all words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.losses.cross_entropy import centred, rounded_lse, token_losses, token_weights
from ...record import Op
from .collectives import of_each_rank
from .shard import IGNORED, ClassSums, VocabShard

# dloss, dlse and dtarget_logit of an op.
Upstream = tuple[Tensor | None, Tensor | None, Tensor | None]


class Labels(NamedTuple):
    """Each token's target, counted from the rank's first word, to be read where `here` is True, and
    whether it is a word or is ignored."""

    target: Tensor
    here: Tensor
    valid: Tensor
    class_weight: Tensor | None = None

    def of(self, tokens: slice) -> Labels:
        return Labels(self.target[tokens], self.here[tokens], self.valid[tokens])


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
    def of_call(call: Any, shard: VocabShard) -> Tokens:
        """The tokens of a call, whose targets and class weights are of the whole vocabulary."""
        linear, target = hasattr(call, "x"), call.target
        class_weight = call.class_weight if linear else call.weight
        within = target != call.ignore_index
        double = (call.x if linear else call.logits).dtype is torch.float64
        dtype = torch.float64 if double else torch.float32
        weights, counts = token_weights(target, within, class_weight, call.token_weight, dtype)
        return Tokens(
            shard.local(target, call.ignore_index), shard.here(target),
            shard.valid(target, call.ignore_index), within, weights, counts,
            shard.of(class_weight), shard.class_sums(class_weight, weights.dtype),
        )  # fmt: skip

    def split(self, size: int) -> list[Tokens]:
        """Chunks of this many tokens."""
        chunks = zip(*(value.reshape(-1).split(size) for value in self[:6]), strict=True)
        same: tuple[Any, ...] = (self.class_weight, self.class_sums)
        return [Tokens(*(*chunk, *same)) for chunk in chunks]


class Statistics(NamedTuple):
    """Of each token, and all words c; x are the effective logits of `cross_entropy`."""

    # log(sum_c exp(x_ic)), and what rounding took from it.
    lse: Tensor
    lse_error: Tensor
    # lse_i - x_i,target_i, and sum_c weight_c * (lse_i - x_ic) or None.
    nll: Tensor
    surprisal: Tensor | None


def call_of_logits(op: Op, logits: Tensor, **options: Any) -> Any:
    """A call of an op of logits, for `local_statistics` or `gradients` to complete."""
    names = {**dict.fromkeys(op.arguments._fields), **op.arguments._field_defaults}
    return op.arguments(**{**names, "logits": logits, **options})


def of_shard(call: Any, tokens: Tokens | Labels, **changed: Any) -> Any:
    """The call of the rank's words alone. Its loss is sum_c weight_c * (lse - x_c) / held, if the
    call's loss needs a sum over words, and its class weights serve no other sum."""
    changed["class_weight" if hasattr(call, "x") else "weight"] = tokens.class_weight
    # Not float() of the comparison: a compiled number may be a symbol.
    changed["label_smoothing"] = 1.0 if call.label_smoothing != 0 else 0.0
    return call._replace(
        target=tokens.target, token_weight=None, num_items_in_batch=None, ignore_index=IGNORED,
        reduction="none", lse_square_scale=0.0, **changed,
    )  # fmt: skip


def local_statistics(op: Op, call: Any, tokens: Tokens | Labels, shard: VocabShard) -> Tensor:
    """(3 or 4, ...): of the rank's words, lse and its error, and relative to lse the target's logit
    and the sum of the logits. Without the target the former is inf, which no difference from lse
    is."""
    with_sum = call.label_smoothing != 0
    if shard.held == 0:
        none = shard.no_statistics(call, tokens.target, 3 + with_sum)
        return with_target(none, 2, tokens.here)
    changed = {"gradient_mask": [False] * 5} if hasattr(call, "x") else {}
    found = op.overload(*of_shard(call, tokens, **changed))
    loss, _, lse, target_logit, _, _, _, error, *_ = found
    # Where all of the rank's words have -inf, so has lse.
    empty = lse == float("-inf")
    parts = [lse, error, torch.where(empty, lse, (target_logit - lse) - error)]
    if with_sum:
        parts.append(torch.where(empty, lse, -shard.held * loss))
    return with_target(torch.stack(parts), 2, tokens.here)


def with_target(local: Tensor, row: int, here: Tensor) -> Tensor:
    """A rank's statistics, whose row of the target is inf where another rank has the target."""
    local[row].masked_fill_(~here, float("inf"))
    return local


def rank_lses(lses: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse of all words and its error, and the logarithms of the ranks' probabilities, from lse and
    its error of each rank's words."""
    highest = lses.detach().amax(0).clamp(min=torch.finfo(lses.dtype).min)
    parts = (lses - highest) + errors
    more, log_sum = centred(parts.movedim(0, -1))
    log_sum = more + log_sum
    return *rounded_lse(highest, log_sum), parts - log_sum


def target_log_prob(targets: Tensor, log_w: Tensor) -> Tensor:
    """The logarithm of the target's probability, from those of the ranks and, relative to lse of
    its rank's words, the target's logit; 0 where no rank has the target."""
    return torch.where(targets == float("inf"), 0.0, targets + log_w).sum(0)


def of_all_ranks(gathered: Tensor, count: int, class_sums: ClassSums) -> Statistics:
    """The statistics of all words, from the gathered ones of the ranks, `count` numbers of each."""
    lses, errors, targets, *totals = of_each_rank(gathered, count).unbind(1)
    lse, error, log_w = rank_lses(lses, errors)
    surprisal = None
    if totals:
        # A rank without a word of a probability above 0 has its -inf, if any, in its sum.
        shifts = [log_w[i].masked_fill(lses[i] == -float("inf"), 0.0) for i in range(len(lses))]
        pairs = zip(class_sums, shifts, strict=True)
        surprisal = -totals[0].sum(0) - sum(weights * shift for weights, shift in pairs)
    return Statistics(lse, error, -target_log_prob(targets, log_w), surprisal)


def losses(statistics: Statistics, tokens: Tokens, call: Any, V: int) -> tuple[Tensor, Tensor]:
    """Each token's loss and z-loss."""
    lse, _, nll, surprisal = statistics
    nll = torch.where(tokens.valid, nll, float("nan"))
    smooth = None if surprisal is None else surprisal / V
    given = (lse, nll, smooth, tokens.weights, tokens.counts, tokens.within)
    return token_losses(*given, call)


def dlse_of_z_loss(call: Any, tokens: Tokens, lse: Tensor, *factors: Tensor) -> list[Tensor]:
    """The gradient of lse from a token's z-loss, whose own is the product of the factors; none if
    there is no z-loss."""
    if call.lse_square_scale == 0:
        return []
    # The lse of an ignored token may be NaN.
    last = torch.where(tokens.within, lse, 0.0)
    # Dynamo of torch 2.11 fails at functools.reduce from a number that is a symbol.
    product = 2 * call.lse_square_scale
    for factor in (*factors, last):
        product = product * factor
    return [product]


def upstream_of_shard(
    lse: Tensor, tokens: Tokens, call: Any, shard: VocabShard, dloss: Tensor | float = 1.0,
    dlses: Sequence[Tensor] = (), dtarget_logit: Tensor | None = None,
) -> Upstream:  # fmt: skip
    """The gradients of the results of the op of the rank's words, from that of each token's loss,
    and those of lse and target_logit that are added."""
    weights, counts = dloss * tokens.weights, dloss * tokens.counts
    hard = (1 - call.label_smoothing) * counts
    dlse = sum(dlse_of_z_loss(call, tokens, lse, counts), hard)
    smoothed = None
    if call.label_smoothing != 0:
        smoothed = call.label_smoothing / shard.V * weights
        dlse = dlse + smoothed * sum(tokens.class_sums)
    for more in dlses:
        dlse = dlse + more
    dtarget_logit = -hard if dtarget_logit is None else dtarget_logit - hard
    dtarget_logit = torch.where(tokens.here, dtarget_logit, 0.0)
    if smoothed is None:
        return None, dlse, dtarget_logit
    # The gradient of the sum of logits, -smoothed, is weight_c for each word: that of -held * loss,
    # without lse's part.
    held = tokens.class_weight
    of_words = shard.held if held is None else held.to(smoothed.dtype).sum()
    return shard.held * smoothed, dlse - smoothed * of_words, dtarget_logit


def gradients(
    op: Op, call: Any, tokens: Tokens | Labels, lse: tuple[Tensor, Tensor], grads: Upstream,
    shard: VocabShard, **changed: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the head, or of logits, by the backward op of the rank's words, which is
    given the lse of all words and its error."""
    dloss, dlse, dtarget_logit = grads
    own = of_shard(call, tokens, dloss=dloss, dz_loss=None, dlse=dlse, **changed)
    # The reduction "none" does not read the sum of the weights.
    of_all = {"lse": lse[0], "lse_error": lse[1], "total_weight": lse[0].new_ones(())}
    return shard.gradients(op, own._replace(dtarget_logit=dtarget_logit, **of_all))
