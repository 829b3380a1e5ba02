"""Cross-entropy of each token from the statistics of all ranks' words, and its gradient.

A call is that of an op, `cross_entropy_forward` and the like. Its logits, or its weight and bias,
have the rank's words alone; its targets and class weights are those of all words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.losses.cross_entropy import centred, rounded_lse, token_losses, token_weights
from ...record import Op
from .shard import IGNORED, ClassSums, VocabShard, view_by_rank

# The gradients dloss, dlse and dtarget_logit of an op's results.
Upstream = tuple[Tensor | None, Tensor | None, Tensor | None]


class Labels(NamedTuple):
    """The targets of tokens."""

    # Counted from the rank's first word; some word where `is_local`, which says whether the target
    # is one of the rank's words, is False.
    target: Tensor
    is_local: Tensor
    # Whether the target is a word of the vocabulary or is ignored.
    valid: Tensor
    class_weight: Tensor | None = None

    def of(self, tokens: slice) -> Labels:
        return Labels(self.target[tokens], self.is_local[tokens], self.valid[tokens])


class ShardTokens(NamedTuple):
    """The tokens of a loss over a sharded vocabulary, each tensor of target's shape."""

    # Counted from the rank's first word; some word where `is_local`, which says whether the target
    # is one of the rank's words, is False.
    target: Tensor
    is_local: Tensor
    # Whether the target is a word or is ignored, and whether it is not ignored.
    valid: Tensor
    within: Tensor
    # The weight of each token, and its product with the weight of its class; 0 for ignored tokens.
    weights: Tensor
    counts: Tensor
    # (held,): the class weights of the rank's words; and the sums of those of each rank.
    class_weight: Tensor | None
    class_sums: ClassSums

    @staticmethod
    def of_call(call: Any, shard: VocabShard) -> ShardTokens:
        """Return the tokens of a call, whose targets and class weights are of all words."""
        linear, target = hasattr(call, "x"), call.target
        class_weight = call.class_weight if linear else call.weight
        within = target != call.ignore_index
        double = (call.x if linear else call.logits).dtype is torch.float64
        dtype = torch.float64 if double else torch.float32
        weights, counts = token_weights(target, within, class_weight, call.token_weight, dtype)
        return ShardTokens(
            shard.local_index(target, call.ignore_index), shard.is_local(target),
            shard.valid(target, call.ignore_index), within, weights, counts,
            shard.local_words(class_weight), shard.class_sums(class_weight, weights.dtype),
        )  # fmt: skip

    def split(self, size: int) -> list[ShardTokens]:
        """Split the tokens into chunks of `size` tokens."""
        chunks = zip(*(value.reshape(-1).split(size) for value in self[:6]), strict=True)
        same: tuple[Any, ...] = (self.class_weight, self.class_sums)
        return [ShardTokens(*(*chunk, *same)) for chunk in chunks]


class TokenStatistics(NamedTuple):
    """The statistics of each token i over all words c. x are the effective logits, scaled and
    capped, of `cross_entropy`."""

    # log(sum_c exp(x_ic)), and its rounding error.
    lse: Tensor
    lse_error: Tensor
    # lse_i - x_i,target_i, and sum_c weight_c * (lse_i - x_ic) or None.
    nll: Tensor
    surprisal: Tensor | None


def call_of_logits(op: Op, logits: Tensor, **options: Any) -> Any:
    """Return a call of an op of logits, which `local_statistics` or `gradients` completes."""
    names = {**dict.fromkeys(op.arguments._fields), **op.arguments._field_defaults}
    return op.arguments(**{**names, "logits": logits, **options})


def restrict_to_shard(call: Any, tokens: ShardTokens | Labels, **changed: Any) -> Any:
    """Return the call of the op for the rank's words alone. If the loss has label smoothing, and so
    a sum over words, the smoothing of this call is 1: its loss is then that sum,
    sum_c weight_c * (lse - x_c) / held, and its class weights are used for nothing else."""
    changed["class_weight" if hasattr(call, "x") else "weight"] = tokens.class_weight
    # Not float(label_smoothing != 0): in a compiled graph the number may be a symbol.
    changed["label_smoothing"] = 1.0 if call.label_smoothing != 0 else 0.0
    return call._replace(
        target=tokens.target, token_weight=None, num_items_in_batch=None, ignore_index=IGNORED,
        reduction="none", lse_square_scale=0.0, **changed,
    )  # fmt: skip


def local_statistics(op: Op, call: Any, tokens: ShardTokens | Labels, shard: VocabShard) -> Tensor:
    """Compute the statistics of the rank's words, (3 or 4, ...): lse and its rounding error, and
    relative to lse the target's logit and, with label smoothing, the weighted sum of the logits.
    The target's logit is inf if another rank has the target: a logit minus lse never is inf."""
    with_sum = call.label_smoothing != 0
    if shard.held == 0:
        none = shard.no_statistics(call, tokens.target, 3 + with_sum)
        return with_target(none, 2, tokens.is_local)
    changed = {"gradient_mask": [False] * 5} if hasattr(call, "x") else {}
    results = op.overload(*restrict_to_shard(call, tokens, **changed))
    loss, _, lse, target_logit, _, _, _, error, *_ = results
    # lse is -inf if all of the rank's logits are; differences from it would be NaN.
    empty = lse == float("-inf")
    statistics = [lse, error, torch.where(empty, lse, (target_logit - lse) - error)]
    if with_sum:
        statistics.append(torch.where(empty, lse, -shard.held * loss))
    return with_target(torch.stack(statistics), 2, tokens.is_local)


def with_target(local: Tensor, row: int, is_local: Tensor) -> Tensor:
    """Write inf into the target's row of a rank's statistics where another rank has the target."""
    local[row].masked_fill_(~is_local, float("inf"))
    return local


def rank_lses(lses: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute lse of all words, its rounding error, and the logarithm of each rank's probability,
    from the lse of each rank's words and its error."""
    # Clamped, because a maximum of -inf would give NaN.
    highest = lses.detach().amax(0).clamp(min=torch.finfo(lses.dtype).min)
    shifted = (lses - highest) + errors
    more, log_sum = centred(shifted.movedim(0, -1))
    log_sum = more + log_sum
    return *rounded_lse(highest, log_sum), shifted - log_sum


def target_log_prob(targets: Tensor, log_w: Tensor) -> Tensor:
    """Compute the logarithm of the target's probability from the logarithms of the ranks'
    probabilities, and the target's logit relative to the lse of its rank's words. It is 0 if no
    rank has the target."""
    return torch.where(targets == float("inf"), 0.0, targets + log_w).sum(0)


def combine_ranks(gathered: Tensor, count: int, class_sums: ClassSums) -> TokenStatistics:
    """Compute the statistics of all words from the gathered statistics of the ranks, of which each
    has `count` numbers a token."""
    lses, errors, targets, *totals = view_by_rank(gathered, count).unbind(1)
    lse, error, log_w = rank_lses(lses, errors)
    surprisal = None
    if totals:
        # A rank without a logit above -inf is not shifted: its sum has the -inf, if it has words,
        # and for a rank without words -inf times their weight of 0 would be NaN.
        shifts = [log_w[i].masked_fill(lses[i] == -float("inf"), 0.0) for i in range(len(lses))]
        pairs = zip(class_sums, shifts, strict=True)
        surprisal = -totals[0].sum(0) - sum(weights * shift for weights, shift in pairs)
    return TokenStatistics(lse, error, -target_log_prob(targets, log_w), surprisal)


def losses(
    statistics: TokenStatistics, tokens: ShardTokens, call: Any, V: int
) -> tuple[Tensor, Tensor]:
    """Compute the loss and the z-loss of each token."""
    lse, _, nll, surprisal = statistics
    nll = torch.where(tokens.valid, nll, float("nan"))
    smooth = None if surprisal is None else surprisal / V
    arguments = (lse, nll, smooth, tokens.weights, tokens.counts, tokens.within)
    return token_losses(*arguments, call)


def dlse_of_z_loss(call: Any, tokens: ShardTokens, lse: Tensor, *factors: Tensor) -> list[Tensor]:
    """Return in a list the gradient of lse that the z-loss gives, where the product of `factors` is
    the gradient of each token's z-loss; an empty list if the loss has no z-loss."""
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
    lse: Tensor, tokens: ShardTokens, call: Any, shard: VocabShard, dloss: Tensor | float = 1.0,
    dlses: Sequence[Tensor] = (), dtarget_logit: Tensor | None = None,
) -> Upstream:  # fmt: skip
    """Compute the gradients of the results of the op for the rank's words from `dloss`, the
    gradient of each token's loss. `dlses` and `dtarget_logit` are added to the gradients of lse and
    of the target's logit."""
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
    dtarget_logit = torch.where(tokens.is_local, dtarget_logit, 0.0)
    if smoothed is None:
        return None, dlse, dtarget_logit
    # The op's loss with smoothing 1 is sum_c weight_c * (lse - x_c) / held. With the gradient
    # held * smoothed, x_c gets -smoothed * weight_c, as it should, and lse gets smoothed times the
    # sum of the weights too much, which is taken from dlse.
    class_weight = tokens.class_weight
    weight_sum = shard.held if class_weight is None else class_weight.to(smoothed.dtype).sum()
    return shard.held * smoothed, dlse - smoothed * weight_sum, dtarget_logit


def gradients(
    op: Op, call: Any, tokens: ShardTokens | Labels, lse: tuple[Tensor, Tensor], grads: Upstream,
    shard: VocabShard, **changed: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of the head, or of logits, by the backward op for the rank's words.
    `lse` is the lse of all words and its rounding error, which make the probabilities global."""
    dloss, dlse, dtarget_logit = grads
    local = restrict_to_shard(call, tokens, dloss=dloss, dz_loss=None, dlse=dlse, **changed)
    # The reduction "none" does not read total_weight, but the op requires it.
    of_all = {"lse": lse[0], "lse_error": lse[1], "total_weight": lse[0].new_ones(())}
    return shard.gradients(op, local._replace(dtarget_logit=dtarget_logit, **of_all))
