"""Log-probabilities and entropy from the logits of a linear layer, in chunks that are not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0
from ..losses.log_prob import OPTIONS, RESULTS, Results, axes_of_call
from .gradients import gradients_by_words
from .head import GRADIENTS, Head, cast_as_linear, flat_tokens
from .lora import lora_input

_LOG_PROB, _GRADIENT = library.OPS["log_prob_forward"], library.OPS["log_prob_backward"]


@library.compose
def linear_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the log-probability of each token's target, and the entropy, of a linear layer.

    The logits are computed in chunks and not kept.

        logits = x @ weight.T + bias
        log_prob, entropy = log_prob(logits, target, temperature, softcap, logit_scale, ...)

    with the equations and options of `log_prob`, of one target a token or of K. Both results are
    differentiable. The logits are computed in x's dtype, as by `torch.nn.functional.linear`, and
    the results from them in float32.

    The forward computes the logits of a part of the tokens at a time, and keeps lse and entropy.
    The backward computes the logits again, of all tokens and a part of the words at a time, and
    writes their gradient over them. A part of the words gives complete rows of the gradient of
    weight: each is one product, rounded once. The gradient of x is summed over the parts in
    accum_dtype and rounded once. If weight and bias need no gradient, the backward takes a part of
    the tokens at a time too, whose gradients of x are complete. Forward and backward together take
    four products of M tokens, V words and D columns. A gradient that is not required is neither
    computed nor allocated. The order of every sum is fixed.

    Memory, beside the results and the gradients: one chunk of logits, of at most chunk_bytes, or
    one row or column; and in the backward the accum_dtype sum of x's gradient, with M times D
    elements, and for K targets a few numbers of each. On a device whose matrix products cannot
    return float32 for bfloat16 (Ascend NPUs), each chunk's part of that sum is rounded to bfloat16
    before it is added. The definition, which runs on a CPU and for float64, holds several float32
    copies of the chunk. The number of chunks changes only the rounding of the result.

    Ignored tokens have results and gradients of exactly 0. Their logits are computed by the matrix
    products, in the forward and in the backward, because no size can depend on the targets without
    waiting for the device. A GPU does not read these logits afterwards. To skip the products too,
    select the tokens that count before the call:

        counts = target != ignore_index
        log_prob, entropy = linear_log_prob(x[counts], weight, target[counts])
        log_prob = log_prob.new_zeros(counts.shape).masked_scatter(counts, log_prob)

    Time and memory are then those of the selected tokens. There may be no selected tokens. In eager
    mode, indexing by a mask waits for the device. torch.compile makes one graph for every number of
    tokens, if `torch._dynamo.config.capture_dynamic_output_shape_ops` is True.

    With lora_a and lora_b, the logits are x @ (weight + lora_scale * lora_b @ lora_a).T + bias, and
    that weight is never formed: see `linear_cross_entropy`. If weight and bias are frozen, the
    backward takes a part of the tokens at a time, and sums the gradient of lora_b in accum_dtype.

    Under autocast x, weight, bias, lora_a and lora_b are cast as `torch.nn.functional.linear` casts
    them.

    This op calls `linear_log_prob_forward`, which returns lse too, and further results on request.

    Args:
        x: (..., D), floating point, any strides.
        weight: (V, D), of x's dtype.
        target: (...) or (..., K), int64 or int32; each is ignore_index, or from 0 to V - 1.
        bias: (V,), of x's dtype.
        temperature, softcap, logit_scale, ignore_index: as for `log_prob`.
        accum_dtype: float32, x's dtype to save the memory of the sum of its gradient, or None for
            float32.
        chunk_bytes: the size of a chunk of logits in x's dtype. None takes LIGER_OPS_LOGITS_BYTES
            from the environment or, if that is not set, 512 MiB in the forward and 384 MiB in the
            backward, where the gradients are in memory too.
        lora_a: (R, D), floating point: with lora_b, a LoRA that is added to weight.
        lora_b: (V, R), floating point. Both, or neither.
        lora_scale: the factor of lora_b @ lora_a.

    Returns:
        log_prob: of target's shape; float32, or float64 if x is.
        entropy: (...), of the same dtype.

    Raises:
        TypeError: x, lora_a or lora_b is not floating point, weight or bias does not have x's
            dtype, or target is not int64 or int32.
        ValueError: the shapes do not fit together, K is 0, or weight has no classes; one of lora_a
            and lora_b is given without the other; the devices differ; temperature, softcap or
            logit_scale is not above 0 and finite; chunk_bytes is below 1; or accum_dtype is neither
            float32 nor x's dtype.
        IndexError: a target is out of range, on a CPU; other devices do as in `log_prob`.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_log_prob(x, weight, torch.tensor([3, -100]))
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """
    x, weight, bias = cast_as_linear(x, weight, bias)
    lora_x, lora_b = lora_input("linear_log_prob", x, weight, lora_a, lora_b, lora_scale)
    return linear_log_prob_forward(
        x, weight, target, bias,
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes,
        lora_x=lora_x, lora_b=lora_b,
    )[:2]  # fmt: skip


@library.forward(
    "... -lora_a -lora_scale return_mean_logits return_log_sum_sq_probs return_predicted "
    "lora_x lora_b",
    returns=RESULTS,
    axes="x=* D, weight=V D: x, target=?: int, bias=V: x, lora_x=* R: x, lora_b=V R: x -> "
    "log_prob=?, entropy=*, lse=*, mean_logits=*, log_sum_sq_probs=*, predicted_tokens=*: int64, "
    "lse_error=*",
    axes_of_call=axes_of_call,
    dtype="float32+x",
    options={**OPTIONS, "chunk_bytes": ABOVE_0},
)
def linear_log_prob_forward(call: Any) -> Results:
    """Compute `linear_log_prob`, lse, and the statistics of `log_prob_forward` in one pass.

    The backward computes the probabilities again from lse. Autocast changes nothing here.

    Args:
        return_mean_logits, return_log_sum_sq_probs, return_predicted: as for `log_prob_forward`.
        lora_x: (..., R), of x's dtype, whose product with lora_b is added to the logits.
        lora_b: (V, R), of x's dtype. Both, or neither.

    Returns:
        log_prob, entropy: the results of `linear_log_prob`.
        lse: of entropy's shape; 0 for an ignored token. Each of the three is differentiable.
        mean_logits, log_sum_sq_probs, predicted_tokens, lse_error: as `log_prob_forward`; 0 for an
            ignored token, not differentiable, and the first three None if not requested.

    Raises:
        TypeError, ValueError, IndexError: as `linear_log_prob`.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_log_prob_forward(x, weight, torch.tensor([3]))[2]
        tensor([1.3863])
    """
    target, parts = flat_tokens(call.target, call.x), []
    for chunk, _, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        arguments = {name: getattr(call, name, None) for name in _LOG_PROB.arguments._fields}
        arguments |= {"logits": logits, "target": target[chunk]}
        parts.append(_LOG_PROB.definition(**arguments))
    return tuple(
        None if values[0] is None else _of_tokens(torch.cat(values), call.x)
        for values in zip(*parts, strict=True)
    )  # type: ignore[return-value]


def _of_tokens(values: Tensor, x: Tensor) -> Tensor:
    """Return values with one row a token in the shape of x's tokens."""
    return values.reshape((*x.shape[:-1], *values.shape[1:]))


@library.backward(
    "linear_log_prob_forward",
    "dlog_prob? dentropy? dlse? x weight target bias entropy lse lse_error ... output_mask"
    " lora_x= lora_b= -> dx dweight dbias dlora_x dlora_b",
    returns=GRADIENTS,
)
def linear_log_prob_backward(call: Any) -> Any:
    """Compute the gradient of `linear_log_prob_forward`.

    dlogits are those of `log_prob_backward`, in x's dtype, with targets counted from the first word
    of the chunk. For each chunk of words:

        dx += dlogits @ weight[words]
        dweight[words] = dlogits.T @ x
        dbias[words] = sum(dlogits, 0)
        dlora_x += dlogits @ lora_b[words]
        dlora_b[words] = dlogits.T @ lora_x
    """
    of_tokens = ("dlog_prob", "dentropy", "dlse", "target", "entropy", "lse", "lse_error")
    flat = {name: getattr(call, name) for name in of_tokens}
    flat = {name: None if x is None else flat_tokens(x, call.x) for name, x in flat.items()}
    options = {name: getattr(call, name) for name in ("temperature", "softcap", "logit_scale")}

    def dlogits_of(logits: Tensor, words: slice) -> Tensor:
        # A target below 0, or past the chunk, is no word of the chunk. ignore_index is counted in
        # the same way, so that no other target is taken for it.
        of_chunk = {"target": flat["target"] - words.start, "logits": logits}
        ignore_index = call.ignore_index - words.start
        return _GRADIENT.definition(**flat | of_chunk, **options, ignore_index=ignore_index)

    return gradients_by_words(call, dlogits_of)


library.keep_dtypes_under_autocast("linear_log_prob_forward", "linear_log_prob_backward")
