"""A policy loss with a centred score, from the logits of a linear layer in chunks that are not
kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0, AT_LEAST_0
from ...record import OutOfRangeError
from ..losses.cross_entropy import REDUCTIONS
from ..losses.log_prob import OPTIONS
from ..losses.score_centering import WEIGHTS, SampledTokens, losses_of
from ..losses.top_k import repeated
from ..tensors import widened
from .gradients import gradients_of_definition
from .head import (
    GRADIENTS,
    Head,
    cast_as_linear,
    divisor,
    finished_in_forward,
    first_given,
    flat_tokens,
    needed_gradients,
    shaped,
    still_missing,
)
from .lora import lora_input
from .precomputed_gradient import PrecomputedFormula, gradients_are_private

_LOG_PROB, _GRADIENT = library.OPS["log_prob_forward"], library.OPS["log_prob_backward"]
_BACKWARD = library.OPS["linear_log_prob_backward"]


@library.compose
def linear_score_centering(
    x: Tensor, weight: Tensor, target: Tensor, words: Tensor, sampling_top_log_prob: Tensor,
    advantages: Tensor, bias: Tensor | None = None, sampling_log_prob: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    importance_sampling: str = "none", importance_min: float = 0.0, importance_max: float = 2.0,
    reduction: str = "mean", temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute REINFORCE with a score of mean zero under the policy that sampled, of a linear layer.

    The logits are computed in chunks and not kept.

        logits = x @ weight.T + bias
        log_prob = log_prob(logits, targets, temperature, softcap, logit_scale, ignore_index)[0]
        loss = score_centering_loss(log_prob[..., 0], log_prob[..., 1:], sampling_top_log_prob,
                                    advantages, target != ignore_index, ...).per_token_loss

    with the equations of `log_prob` for the K + 1 targets of a token, the sampled word and the
    words that the sampler lists, and those of `liger_ops.losses.score_centering_loss`. The
    reduction "mean" divides the sum of the tokens' losses by num_items_in_batch, or if that is None
    by the number of kept tokens. Both results are differentiable. The gradient of loss is that of
    log_prob times coefficients that are constants: it is not the derivative of loss's value, which
    is no measure of progress.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes that of loss,
    as `linear_cross_entropy` does: forward and backward together take three products of M tokens, V
    words and D columns. The backward multiplies it by the gradient of loss and the reduction's
    factor. If log_prob has a gradient too, for the reduction "none", in a second backward with
    `retain_graph=True` for the gradient of weight, and for a second derivative, the backward
    recomputes the logits as that of `linear_log_prob` does, which makes four products.

    Precision, chunks, the sums of gradients, and a LoRA are those of `linear_cross_entropy`; where
    the backward recomputes the logits, those of `linear_log_prob`. The order of every sum is fixed.

    Memory, beside the results and the gradients: as for `linear_cross_entropy`, and a few numbers
    of each listed word.

    Under autocast x, weight, bias, lora_a and lora_b are cast as `torch.nn.functional.linear` casts
    them.

    This op calls `linear_score_centering_forward`, which returns more.

    Args:
        x: (..., D), floating point, any strides.
        weight: (V, D), of x's dtype.
        target: (...), int64 or int32: the sampled words; each is ignore_index for a token that is
            dropped, or from 0 to V - 1.
        words: (..., K), int64 or int32: the words that the sampler lists. An entry is left out
            where it is ignore_index, sampling_top_log_prob is -inf, or the word is listed before.
        sampling_top_log_prob: (..., K), floating point: the sampler's log-probabilities of these
            words.
        advantages: (...), floating point.
        bias: (V,), of x's dtype.
        sampling_log_prob: (...), floating point: the sampler's log-probability of each sampled
            word; needed if importance_sampling is not "none".
        num_items_in_batch: (), any dtype but bool and complex; the divisor of the mean.
        importance_sampling: the weights of the scores: "none", "truncate" or "mask".
        importance_min, importance_max: the bounds of p / q, at least 0.
        reduction: "none", "mean" or "sum".
        temperature, softcap, logit_scale, ignore_index: as for `log_prob`.
        accum_dtype, chunk_bytes, lora_a, lora_b, lora_scale: as for `linear_cross_entropy`.

    Returns:
        loss: (), or target's shape for the reduction "none"; float32, or float64 if x is. 0 for a
            dropped token.
        log_prob: (..., K + 1), of the same dtype: the policy's log-probability of the sampled word,
            and of the listed ones; 0 where one does not count.

    Raises:
        TypeError: a tensor is not of its dtype above, or sampling_log_prob is None although
            importance_sampling is not "none".
        ValueError: the shapes do not fit together, or weight has no classes; one of lora_a and
            lora_b is given without the other; the devices differ; an option is outside its range;
            num_items_in_batch is given with another reduction than "mean"; accum_dtype is neither
            float32 nor weight's dtype; or another tensor than those of the head requires a
            gradient.
        IndexError: a word that counts is out of range, on a CPU; other devices give NaN for its
            log-probability.

    Source: Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning",
        arXiv:2609.20807.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> target, words = torch.tensor([3]), torch.tensor([[0, 1]])
        >>> q, advantages = torch.tensor([[0.5, 0.25]]), torch.ones(1)
        >>> liger_ops.linear_score_centering(x, weight, target, words, q.log(), advantages)
        (tensor(1.0397), tensor([[-1.3863, -1.3863, -1.3863]]))
    """
    x, weight, bias = cast_as_linear(x, weight, bias)
    lora_x, lora_b = lora_input("linear_score_centering", x, weight, lora_a, lora_b, lora_scale)
    mask = needed_gradients((x, weight, bias, lora_x, lora_b), reduction)
    with gradients_are_private():
        return linear_score_centering_forward(
            x, weight, target, words, sampling_top_log_prob, advantages, bias, sampling_log_prob,
            num_items_in_batch, importance_sampling, importance_min, importance_max, reduction,
            temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes,
            gradient_mask=mask, lora_x=lora_x, lora_b=lora_b,
        )[:2]  # fmt: skip


@library.forward(
    "... -lora_a -lora_scale gradient_mask lora_x lora_b",
    returns=f"loss log_prob lse coefficients total_weight lse_error {GRADIENTS}",
    axes="x=* D, weight=V D: x, target=*: int, words=* K: int, sampling_top_log_prob=* K, "
    "advantages=*, bias=V: x, sampling_log_prob=*, num_items_in_batch=: number, lora_x=* R: x, "
    "lora_b=V R: x -> loss=[*], log_prob=* W, lse=*, coefficients=* W, total_weight=, lse_error=*, "
    "dx=* D, dweight=V D, dbias=V, dlora_x=* R, dlora_b=V R",
    dtype="float32+x",
    options={
        **OPTIONS, "importance_sampling": tuple(WEIGHTS), "importance_min": AT_LEAST_0,
        "importance_max": AT_LEAST_0, "reduction": REDUCTIONS, "chunk_bytes": ABOVE_0,
    },
)  # fmt: skip
def linear_score_centering_forward(
    call: Any,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """Compute `linear_score_centering`, and return its intermediate results and gradients too.

    The gradients that gradient_mask asks for are those of the sum of the tokens' losses, in x's
    dtype; for float16 in float32, and the gradients of weight and lora_b in accum_dtype. The
    backward uses them if loss is the only result with a gradient, and otherwise recomputes the
    logits. Autocast changes nothing here.

    Args:
        gradient_mask: whether to compute dx, dweight, dbias, dlora_x and dlora_b. All False for the
            reduction "none".
        lora_x: (..., R), of x's dtype, whose product with lora_b is added to the logits.
        lora_b: (V, R), of x's dtype. Both, or neither.

    Returns:
        loss, log_prob: the results of `linear_score_centering`.
        lse: (...), as of `log_prob_forward`. Each of the three is differentiable.
        coefficients: (..., K + 1), the gradient of each token's loss with respect to log_prob.
        total_weight: (), the number of kept tokens.
        lse_error: (...), as of `log_prob_forward`. These three are of loss's dtype.
        dx, dweight, dbias, dlora_x, dlora_b: contiguous, of the shapes of x, weight, bias, lora_x
            and lora_b; each is None unless gradient_mask asks for it.

    Raises:
        TypeError, ValueError, IndexError: as `linear_score_centering`; or gradient_mask asks for a
            gradient with the reduction "none", or for the gradient of a tensor that is None.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> target, words = torch.tensor([3]), torch.tensor([[0, 1]])
        >>> q, advantages = torch.tensor([[0.5, 0.25]]), torch.ones(1)
        >>> liger_ops.linear_score_centering_forward(
        ...     x, weight, target, words, q.log(), advantages
        ... )[3]  # coefficients
        tensor([[-1.0000,  0.3750,  0.1250]])
    """
    tokens, in_forward = Tokens.of_call(call), any(call.gradient_mask)
    options = (call.weight, call.gradient_mask, call.accum_dtype)
    gradients, parts = gradients_of_definition(*options, in_forward=True), []
    for chunk, chunk_head, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        targets = tokens.targets[chunk]
        part = as_log_prob(_LOG_PROB, call, logits=logits, target=targets)
        try:
            log_prob, _, lse, *_, error = _LOG_PROB.definition(*part)
        except OutOfRangeError as raised:
            raise OutOfRangeError("target and words", *raised.args[1:]) from None
        coefficients = tokens.sampled.chunk(chunk).coefficients(log_prob)
        parts.append((log_prob, lse, coefficients, error))
        if in_forward:
            with torch.no_grad():
                part = as_log_prob(
                    _GRADIENT, call, logits=logits, target=targets, dlog_prob=coefficients,
                    dentropy=None, dlse=None, entropy=lse, lse=lse, lse_error=error,
                )  # fmt: skip
                gradients.add(chunk_head, _GRADIENT.definition(*part))
    return *results_of(call, tokens, parts), *shaped(gradients.results(), call)


@library.backward(
    "linear_score_centering_forward",
    "dloss? dlog_prob? dlse? x weight target words sampling_top_log_prob bias num_items_in_batch"
    " lse coefficients total_weight lse_error dx? dweight? dbias? ... -importance_sampling"
    " -importance_min -importance_max output_mask lora_x= lora_b= dlora_x= dlora_b="
    " -> dx dweight dbias dlora_x dlora_b",
    returns=GRADIENTS,
    formula=PrecomputedFormula,
)
def linear_score_centering_backward(call: Any) -> Any:
    """Compute the gradient of `linear_score_centering_forward`.

    A gradient that the forward computed, and that is an argument here, is multiplied by dloss and
    the reduction's factor, in float32, and rounded once. The others are those of
    `linear_log_prob_backward` for the K + 1 targets of a token, with the gradient

        dlog_prob + dloss * coefficients / the reduction's divisor
    """
    finished = finished_in_forward(call, divisor(call, call.total_weight))
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    return first_given(finished, _BACKWARD.definition(*gradient_of_words(call, missing)))


class Tokens(NamedTuple):
    """The tokens of a call of the forward op, in one dimension.

    targets, (M, K + 1), are the sampled word and the listed ones, or ignore_index.
    """

    targets: Tensor
    kept: Tensor
    sampled: SampledTokens

    @staticmethod
    def of_call(call: Any) -> Tokens:
        names = ("target", "words", "sampling_top_log_prob", "advantages")
        target, words, top, advantages = (flat_tokens(getattr(call, n), call.x) for n in names)
        targets, listed = targets_of(target, words, top, call.ignore_index)
        kept, dtype = target != call.ignore_index, widened(call.x[:0]).dtype
        of_sampled = call.sampling_log_prob
        if of_sampled is not None:
            of_sampled = flat_tokens(of_sampled, call.x)
        importance = (call.importance_sampling, call.importance_min, call.importance_max)
        sampled = SampledTokens.of(kept, listed, dtype, top, advantages, of_sampled, importance)
        return Tokens(targets, kept, sampled)


def results_of(call: Any, tokens: Tokens, parts: Sequence[tuple[Tensor, ...]]) -> Any:
    """Return the results of the forward op but for the gradients. `parts` are log_prob, lse,
    coefficients and lse_error of each chunk of tokens."""
    log_prob, lse, coefficients, error = (torch.cat(x) for x in zip(*parts, strict=True))
    total_weight = tokens.kept.sum().to(lse.dtype)
    results = (losses_of(coefficients, log_prob), log_prob, lse, coefficients, error)
    shape = call.target.shape
    loss, log_prob, lse, coefficients, error = (x.reshape((*shape, *x.shape[1:])) for x in results)
    if call.reduction != "none":
        loss = loss.sum() / divisor(call, total_weight)
    return loss, log_prob, lse, coefficients, total_weight, error


def targets_of(
    target: Tensor, words: Tensor, sampling_top_log_prob: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the K + 1 targets of each token, the sampled and the listed words, with ignore_index
    in place of those that do not count; and which of the listed ones count."""
    target = target.unsqueeze(-1)
    listed = (target != ignore_index) & (sampling_top_log_prob != -torch.inf)
    words = words.masked_fill(~listed, ignore_index)
    words = words.masked_fill(repeated(words), ignore_index)
    return torch.cat([target, words], -1), words != ignore_index


def as_log_prob(op: Any, call: Any, **values: Any) -> Any:
    """Return the call of `op`, an op of log_prob or linear_log_prob, that has the values given here
    and otherwise those of a call of this op."""
    named = {name: getattr(call, name) for name in op.arguments._fields if hasattr(call, name)}
    return op.arguments(**named | values)


def gradient_of_words(call: Any, output_mask: list[bool]) -> Any:
    """Return the call of linear_log_prob_backward that computes the gradients of a call of
    linear_score_centering_backward from recomputed logits."""
    terms = [] if call.dlog_prob is None else [call.dlog_prob]
    if call.dloss is not None:
        of_tokens = call.dloss / divisor(call, call.total_weight)
        terms.append(of_tokens.unsqueeze(-1) * call.coefficients)
    targets, _ = targets_of(call.target, call.words, call.sampling_top_log_prob, call.ignore_index)
    # The entropy is read only if it has a gradient.
    return as_log_prob(
        _BACKWARD, call, target=targets, dlog_prob=sum(terms) if terms else None, dentropy=None,
        entropy=call.lse, output_mask=output_mask,
    )  # fmt: skip


library.keep_dtypes_under_autocast(
    "linear_score_centering_forward", "linear_score_centering_backward"
)
