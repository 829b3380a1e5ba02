"""The most probable words of a linear layer, from logits in chunks that are not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0, AT_LEAST_1
from ..losses.log_prob import OPTIONS
from .head import GRADIENTS, Head, cast_as_linear
from .lora import lora_input

_LOG_PROB = library.OPS["log_prob_forward"].definition
_BACKWARD = library.OPS["linear_log_prob_backward"]


@library.compose
def linear_top_k(
    x: Tensor, weight: Tensor, k: int | torch.SymInt, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Find the k most probable words of each token, and their log-probabilities, of a linear layer.

    The logits are computed in chunks and not kept.

        logits = x @ weight.T + bias
        words = logits.topk(k).indices
        log_prob = log_prob(logits, words, temperature, softcap, logit_scale)[0]

    with the equations of `log_prob` for K targets. log_prob is differentiable; words has no
    gradient. The words of a token are in descending order of their logits, and those of equal
    logits in ascending order. Which of several words with the k-th logit are taken is
    `torch.topk`'s choice, which the documentation of PyTorch leaves open.

    The logits are computed in x's dtype, as by `torch.nn.functional.linear`, and log_prob from them
    in float32. Words are compared by their logits, before softcap, which may make some equal. The
    forward computes the logits once, for the words, lse and log_prob. The backward is that of
    `linear_log_prob` with these words: forward and backward together take four products of M
    tokens, V words and D columns. As in `softmax`, a token whose logits contain inf or NaN has NaN
    log-probabilities.

    Memory, beside the results and the gradients: as for `linear_log_prob`, and 2 float32 numbers a
    token.

    Under autocast x, weight, bias, lora_a and lora_b are cast as `torch.nn.functional.linear` casts
    them.

    This op calls `linear_top_k_forward`.

    Args:
        x: (..., D), floating point, any strides.
        weight: (V, D), of x's dtype.
        k: the number of words, from 1 to V.
        bias: (V,), of x's dtype.
        temperature, softcap, logit_scale: as for `log_prob`.
        accum_dtype, chunk_bytes, lora_a, lora_b, lora_scale: as for `linear_log_prob`.

    Returns:
        words: (..., k), int64.
        log_prob: (..., k), float32, or float64 if x is.

    Raises:
        TypeError: x, lora_a or lora_b is not floating point, or weight or bias does not have x's
            dtype.
        ValueError: k is not from 1 to V; the shapes do not fit together, or weight has no classes;
            one of lora_a and lora_b is given without the other; the devices differ; temperature,
            softcap or logit_scale is not above 0 and finite; chunk_bytes is below 1; or accum_dtype
            is neither float32 nor x's dtype.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, which
        computes softmax and the largest classes together.

    Example:
        >>> x, weight = torch.ones(1, 2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> liger_ops.linear_top_k(x, weight, 2)
        (tensor([[2, 1]]), tensor([[-0.4076, -1.4076]]))
    """
    x, weight, bias = cast_as_linear(x, weight, bias)
    lora_x, lora_b = lora_input("linear_top_k", x, weight, lora_a, lora_b, lora_scale)
    log_prob, _, words, _ = linear_top_k_forward(
        x, weight, k, bias, temperature, softcap, logit_scale, accum_dtype, chunk_bytes,
        lora_x=lora_x, lora_b=lora_b,
    )  # fmt: skip
    return words, log_prob


@library.forward(
    "... -lora_a -lora_scale lora_x lora_b",
    returns="log_prob lse words lse_error",
    axes="x=* D, weight=V D: x, bias=V: x, lora_x=* R: x, lora_b=V R: x -> "
    "log_prob=* K, lse=*, words=* K: int64, lse_error=*",
    dtype="float32+x",
    options={**OPTIONS, "k": AT_LEAST_1, "chunk_bytes": ABOVE_0},
)
def linear_top_k_forward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `linear_top_k`, and lse of each token, from which the backward computes the
    probabilities again. Autocast changes nothing here.

    Args:
        lora_x: (..., R), of x's dtype, whose product with lora_b is added to the logits.
        lora_b: (V, R), of x's dtype. Both, or neither.

    Returns:
        log_prob: (..., k), the result of `linear_top_k`.
        lse: (...), of the same dtype. Both are differentiable.
        words: (..., k), int64, the result of `linear_top_k`.
        lse_error: (...), as of `log_prob_forward`; not differentiable.

    Raises:
        TypeError, ValueError: as `linear_top_k`.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_top_k_forward(x, weight, 1)[1]
        tensor([1.3863])
    """
    parts = []
    for _, _, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        words = most_probable(logits.detach(), call.k)
        options = (call.temperature, call.softcap, call.logit_scale)
        log_prob, _, lse, *_, error = _LOG_PROB(logits, words, *options)
        parts.append((log_prob, lse, words, error))
    tokens = call.x.shape[:-1]
    log_prob, lse, words, error = (
        torch.cat(values).reshape((*tokens, *values[0].shape[1:]))
        for values in zip(*parts, strict=True)
    )
    return log_prob, lse, words, error


@library.backward(
    "linear_top_k_forward",
    "dlog_prob? dlse? x weight bias lse words lse_error ... -k output_mask lora_x= lora_b="
    " -> dx dweight dbias dlora_x dlora_b",
    returns=GRADIENTS,
)
def linear_top_k_backward(call: Any) -> Any:
    """Compute the gradient of `linear_top_k_forward`: that of `linear_log_prob` with the words as
    its K targets."""
    return _BACKWARD.definition(*as_log_prob(call))


def as_log_prob(call: Any) -> Any:
    """Return the call of linear_log_prob_backward that computes a call of linear_top_k_backward."""
    named = call._asdict()
    named["target"] = named.pop("words")
    # The entropy is read only if it has a gradient. No word is negative.
    return _BACKWARD.arguments(dentropy=None, entropy=call.lse, ignore_index=-100, **named)


def most_probable(logits: Tensor, k: Any) -> Tensor:
    """Return the columns of the k largest logits of each row, in descending order, and those of
    equal logits in ascending order."""
    columns = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    order = logits.gather(-1, columns).sort(dim=-1, descending=True, stable=True).indices
    return columns.gather(-1, order)


library.keep_dtypes_under_autocast("linear_top_k_forward", "linear_top_k_backward")
