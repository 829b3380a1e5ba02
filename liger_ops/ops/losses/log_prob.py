"""Log-probabilities of classes, and the entropy, from logits.

A target has the shape of the tokens, or one more dimension for K classes a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import POSITIVE, Options
from .cross_entropy import centred, effective, log_softmax_of, picked, rounded_lse

RESULTS = "log_prob entropy lse mean_logits log_sum_sq_probs predicted_tokens lse_error"
OPTIONS: Options = dict.fromkeys(("temperature", "softcap", "logit_scale"), POSITIVE)
Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]


def has_words(call: Any) -> bool:
    """Return whether the target of a call lists K classes a token."""
    x = call.x if hasattr(call, "x") else call.logits
    # Not dim(), which the specs of DTensors lack.
    return len(call.target.shape) == len(x.shape)


def axes_of_call(call: Any, axes: str) -> str:
    """Return the line of a call: target and log_prob have the axes of the tokens, and K if the
    target lists K classes a token."""
    return axes.replace("?", "* K" if has_words(call) else "*")


@library.compose
def log_prob(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the log-probability of each token's target, and the entropy of its distribution.

    With x = softcap * tanh(logits * logit_scale / softcap) / temperature, or
    x = logits * logit_scale / temperature without softcap, for token i and class c:

        lse_i = log(sum_c exp(x_ic))
        p_ic = exp(x_ic - lse_i)
        log_prob_i = x_i,target_i - lse_i
        entropy_i = -sum_c p_ic * log(p_ic)

    and both are 0 if target_i is ignore_index. This is
    `torch.log_softmax(x, -1).gather(-1, target)` with `torch.distributions.Categorical.entropy`.

    A target of K classes a token, (..., K), gives K log-probabilities, each differentiable, in the
    same pass. Each is ignore_index or a class, and a class may occur several times. One that is
    ignore_index has a log-probability and a gradient of 0, and a token is ignored if all K are.

    Both results are computed and returned in float32, whatever the dtype of the logits; autocast
    changes nothing. The logits are read once, and never written, widened or normalised in memory:
    beside the results, two numbers per token are stored. The logits of ignored tokens are not read
    on a GPU. float64 runs the definition on every device.

    Both results are differentiable. The gradient of the logits is computed from the logits, lse and
    entropy, in float32, in one pass, and rounded once. An ignored token has a gradient of exactly
    0, whatever its logits are.

    As in `softmax`, a class of -inf has probability 0 and adds nothing to the entropy; a row that
    is all -inf, or that contains inf or NaN, gives NaN.

    This op calls `log_prob_forward`, which returns lse too, and further results on request.

    Args:
        logits: (..., V), floating point, any strides; unit stride in the last dimension is fast.
        target: (...) or (..., K), int64 or int32; each is ignore_index, or from 0 to V - 1.
        temperature: above 0.
        softcap: above 0, or None for no cap.
        logit_scale: above 0.
        ignore_index: the target of tokens that do not count.

    Returns:
        log_prob: of target's shape; float32, or float64 if the logits are.
        entropy: (...), of the same dtype.

    Raises:
        TypeError: logits is not floating point, or target is not int64 or int32.
        ValueError: logits has no class, target has neither the shape of the tokens nor K of at
            least 1 beside it, the devices differ, or temperature, softcap or logit_scale is not
            above 0 and finite.
        IndexError: a target is out of range. For a target (...), a GPU stops with a device-side
            assertion. An NPU, and a GPU for (..., K), gives NaN. None reads out of bounds.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Example:
        >>> liger_ops.log_prob(torch.zeros(2, 4), torch.tensor([3, -100]))
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """
    return log_prob_forward(logits, target, temperature, softcap, logit_scale, ignore_index)[:2]


@library.forward(
    "... return_mean_logits return_log_sum_sq_probs return_predicted",
    tags=torch.Tag.needs_fixed_stride_order,
    returns=RESULTS,
    axes="logits=* V, target=?: int -> log_prob=?, entropy=*, lse=*, mean_logits=*, "
    "log_sum_sq_probs=*, predicted_tokens=*: int64, lse_error=*",
    axes_of_call=axes_of_call,
    dtype="float32+logits",
    options=OPTIONS,
)
def log_prob_forward(call: Any) -> Results:
    """Compute `log_prob`, lse, and statistics of each token's distribution in one pass.

    The backward computes the probabilities again from lse.

    With x and p of `log_prob`:

        mean_logits_i = sum_c x_ic / V
        log_sum_sq_probs_i = log(sum_c p_ic**2)

    Args:
        return_mean_logits, return_log_sum_sq_probs, return_predicted: whether to compute
            mean_logits, log_sum_sq_probs and predicted_tokens.

    Returns:
        log_prob, entropy: the results of `log_prob`.
        lse: of entropy's shape; 0 for an ignored token. Each of the three is differentiable.
        mean_logits, log_sum_sq_probs: of the same shape and dtype; 0 for an ignored token; not
            differentiable. None if not requested. A class of -inf makes mean_logits -inf.
        predicted_tokens: of the same shape, int64; the first class with the largest logit, and 0
            for an ignored token; not differentiable. None without return_predicted.
        lse_error: as `cross_entropy_forward`; 0 for an ignored token.

    Raises:
        TypeError, ValueError, IndexError: as `log_prob`.

    Example:
        >>> liger_ops.log_prob_forward(torch.zeros(1, 4), torch.tensor([3]))[2]
        tensor([1.3863])
    """
    x, counts, within = _scaled_logits(call)
    maximum, log_sum = centred(x)
    lse, lse_error = rounded_lse(maximum, log_sum)
    if has_words(call):
        maximum, log_sum = maximum.unsqueeze(-1), log_sum.unsqueeze(-1)
    log_prob = picked(x, call.target, call.ignore_index) - maximum - log_sum
    # The entropy is computed from PyTorch's log_softmax, which is more exact than lse: all classes
    # share the error of its sum of exponentials.
    log_p = torch.log_softmax(x, -1)
    p = torch.exp(log_p)
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    mean_logits = x.detach().mean(-1) if call.return_mean_logits else None
    log_sum_sq_probs = p.detach().square().sum(-1).log() if call.return_log_sum_sq_probs else None
    predicted = call.logits.detach().argmax(-1) if call.return_predicted else None
    results = (entropy, lse, mean_logits, log_sum_sq_probs, predicted, lse_error)
    of_tokens = (None if value is None else value.masked_fill(~within, 0) for value in results)
    return log_prob.masked_fill(~counts, 0), *of_tokens  # type: ignore[return-value]


@library.backward(
    "log_prob_forward",
    "dlog_prob? dentropy? dlse? logits target entropy lse lse_error ... -> dlogits",
)
def log_prob_backward(call: Any) -> Any:
    """Compute the gradient of `log_prob_forward`.

        dx_ic = dlog_prob_i * ((c == target_i) - p_ic) + dlse_i * p_ic
                - dentropy_i * p_ic * (log(p_ic) + entropy_i)
        p_ic = exp((x_ic - lse_i) - lse_error_i)
        dlogits_ic = dx_ic * logit_scale / temperature * (1 - (x_ic * temperature / softcap)**2)

    and dlogits_i = 0 for an ignored token. For K targets the term of dlog_prob is

        sum_k dlog_prob_ik * (c == target_ik) - p_ic * sum_k dlog_prob_ik

    over those that are not ignored. The logits may be those of a part of the classes, with
    the lse and the entropy of all.
    """
    return dlogits_of(call, functools.partial(_of_targets, call))


def dlogits_of(call: Any, of_targets: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return the gradient of the logits of a backward's call.

    of_targets(p) returns the term of dlog_prob in the gradient of x, or None, from the
    probabilities of the classes.
    """
    x, _, within = _scaled_logits(call)
    cap, scale = tempered(call.temperature, call.softcap, call.logit_scale)
    entropy = call.entropy.to(x.dtype).unsqueeze(-1)
    log_p = log_softmax_of(x, call.lse, call.lse_error)
    p = torch.exp(log_p)
    dx = torch.zeros_like(x)
    if call.dlse is not None:
        dx = dx + call.dlse.to(x.dtype).unsqueeze(-1) * p
    terms = of_targets(p)
    if terms is not None:
        dx = dx + terms
    if call.dentropy is not None:
        # A class of probability 0 has a gradient of 0, although its logarithm is -inf.
        centred = torch.where(p == 0, 0.0, log_p + entropy)
        dx = dx - call.dentropy.to(x.dtype).unsqueeze(-1) * (p * centred)
    if cap is not None:
        dx = dx * (1 - (x / cap).square())
    dx = torch.where(within.unsqueeze(-1), dx * scale, 0.0)
    return dx.to(call.logits.dtype).contiguous()


def _of_targets(call: Any, p: Tensor) -> Tensor | None:
    if call.dlog_prob is None:
        return None
    dlog_prob = call.dlog_prob.to(p.dtype)
    if has_words(call):
        dlog_prob = torch.where(call.target != call.ignore_index, dlog_prob, 0.0)
        return at_words(dlog_prob, call.target, p) - p * dlog_prob.sum(-1, keepdim=True)
    is_target = torch.arange(p.shape[-1], device=p.device) == call.target.unsqueeze(-1)
    return dlog_prob.unsqueeze(-1) * (is_target.to(p.dtype) - p)


def tempered(
    temperature: float, softcap: float | None, logit_scale: float
) -> tuple[float | None, float]:
    """Return the softcap and the logit_scale that include the temperature.

    softcap * tanh(v / softcap) / temperature is (softcap / temperature) * tanh(v / softcap), and
    v / softcap is (v / temperature) / (softcap / temperature).
    """
    return None if softcap is None else softcap / temperature, logit_scale / temperature


def at_words(values: Tensor, words: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of x's shape with the sum of the values, (..., K), of each word in its
    column. A word that x lacks is left out."""
    V = x.shape[-1]
    columns = torch.where((words >= 0) & (words < V), words, V).long()
    wide = torch.nn.functional.pad(torch.zeros_like(x), (0, 1))
    return wide.scatter_add(-1, columns, values.to(x.dtype))[..., :V]


def _scaled_logits(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, whether each target counts, and whether each token does.

    The logits of an ignored token are replaced
    by 0: they may be NaN, which would make the gradient NaN.
    """
    within = counts = call.target != call.ignore_index
    if has_words(call):
        within = counts.any(-1)
    kept = torch.where(within.unsqueeze(-1), call.logits, 0.0)
    x = effective(kept, *tempered(call.temperature, call.softcap, call.logit_scale))
    return x, counts, within
