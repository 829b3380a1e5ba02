"""Log-probabilities of classes, and the entropy, from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import POSITIVE, Options
from .cross_entropy import centred, effective, log_softmax_of, picked, rounded_lse

RESULTS = "log_prob entropy lse mean_logits log_sum_sq_probs predicted_tokens lse_error"
OPTIONS: Options = dict.fromkeys(("temperature", "softcap", "logit_scale"), POSITIVE)
Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]


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
        target: (...), int64 or int32; each is ignore_index, or from 0 to V - 1.
        temperature: above 0.
        softcap: above 0, or None for no cap.
        logit_scale: above 0.
        ignore_index: the target of tokens that do not count.

    Returns:
        log_prob, entropy: of target's shape; float32, or float64 if the logits are.

    Raises:
        TypeError: logits is not floating point, or target is not int64 or int32.
        ValueError: logits has no class, target does not have the shape of the tokens, the
            devices differ, or temperature, softcap or logit_scale is not above 0 and finite.
        IndexError: a target is out of range. A GPU stops with a device-side assertion, and an NPU
            gives NaN; neither reads out of bounds.

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
    axes="logits=* V, target=*: int -> log_prob=*, entropy=*, lse=*, mean_logits=*, "
    "log_sum_sq_probs=*, predicted_tokens=*: int64, lse_error=*",
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
        lse: of their shape and dtype; 0 for an ignored token. Each of the three is differentiable.
        mean_logits, log_sum_sq_probs: of the same shape and dtype; 0 for an ignored token; not
            differentiable. None if not requested. A class of -inf makes mean_logits -inf.
        predicted_tokens: of target's shape, int64; the first class with the largest logit, and 0
            for an ignored token; not differentiable. None without return_predicted.
        lse_error: as `cross_entropy_forward`; 0 for an ignored token.

    Raises:
        TypeError, ValueError, IndexError: as `log_prob`.

    Example:
        >>> liger_ops.log_prob_forward(torch.zeros(1, 4), torch.tensor([3]))[2]
        tensor([1.3863])
    """
    x, within = _scaled_logits(call)
    maximum, log_sum = centred(x)
    lse, lse_error = rounded_lse(maximum, log_sum)
    log_prob = picked(x, call.target, call.ignore_index, "log_prob") - maximum - log_sum
    # The entropy is computed from PyTorch's log_softmax, which is more exact than lse: all classes
    # share the error of its sum of exponentials.
    log_p = torch.log_softmax(x, -1)
    p = torch.exp(log_p)
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    mean_logits = x.detach().mean(-1) if call.return_mean_logits else None
    log_sum_sq_probs = p.detach().square().sum(-1).log() if call.return_log_sum_sq_probs else None
    predicted = call.logits.detach().argmax(-1) if call.return_predicted else None
    results = (log_prob, entropy, lse, mean_logits, log_sum_sq_probs, predicted, lse_error)
    return tuple(  # type: ignore[return-value]
        None if value is None else value.masked_fill(~within, 0) for value in results
    )


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

    and dlogits_i = 0 for an ignored token. The logits may be those of a part of the classes, with
    the lse and the entropy of all.
    """
    x, within = _scaled_logits(call)
    cap, scale = tempered(call.temperature, call.softcap, call.logit_scale)
    entropy = call.entropy.to(x.dtype).unsqueeze(-1)
    log_p = log_softmax_of(x, call.lse, call.lse_error)
    p = torch.exp(log_p)
    dx = torch.zeros_like(x)
    if call.dlse is not None:
        dx = dx + call.dlse.to(x.dtype).unsqueeze(-1) * p
    if call.dlog_prob is not None:
        is_target = torch.arange(x.shape[-1], device=x.device) == call.target.unsqueeze(-1)
        dx = dx + call.dlog_prob.to(x.dtype).unsqueeze(-1) * (is_target.to(x.dtype) - p)
    if call.dentropy is not None:
        # A class of probability 0 has a gradient of 0, although its logarithm is -inf.
        centred = torch.where(p == 0, 0.0, log_p + entropy)
        dx = dx - call.dentropy.to(x.dtype).unsqueeze(-1) * (p * centred)
    if cap is not None:
        dx = dx * (1 - (x / cap).square())
    dx = torch.where(within.unsqueeze(-1), dx * scale, 0.0)
    return dx.to(call.logits.dtype).contiguous()


def tempered(
    temperature: float, softcap: float | None, logit_scale: float
) -> tuple[float | None, float]:
    """Return the softcap and the logit_scale that include the temperature.

    softcap * tanh(v / softcap) / temperature is (softcap / temperature) * tanh(v / softcap), and
    v / softcap is (v / temperature) / (softcap / temperature).
    """
    return None if softcap is None else softcap / temperature, logit_scale / temperature


def _scaled_logits(call: Any) -> tuple[Tensor, Tensor]:
    """Return x, and whether each token counts.

    The logits of an ignored token are replaced by 0: they may be NaN, which would make the gradient
    NaN.
    """
    within = call.target != call.ignore_index
    kept = torch.where(within.unsqueeze(-1), call.logits, 0.0)
    return effective(kept, *tempered(call.temperature, call.softcap, call.logit_scale)), within
