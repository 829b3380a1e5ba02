"""The divergence of a linear layer's distribution from a teacher that lists its top k words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0
from ...record import looked_up
from ..losses.cross_entropy import effective, log_softmax_of, logsumexp
from ..losses.log_prob import OPTIONS, at_words, tempered
from ..losses.top_k import check_teacher, distinct, divergence_of_classes
from .gradients import gradients_by_words
from .head import GRADIENTS, Head, cast_as_linear, rows_of
from .lora import lora_input


@library.compose
def linear_top_k_divergence(
    x: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor,
    bias: Tensor | None = None, target: Tensor | None = None,
    kind: str = "jsd", beta: float = 0.5, tail: str = "bucket",
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Compute the divergence of a student's head from a teacher that lists some words per token.

    The teacher gives the log-probabilities of the listed words. The student's logits are computed
    in chunks and not kept.

        logits = x @ weight.T + bias
        z = softcap * tanh(logits * logit_scale / softcap) / temperature, or
        z = logits * logit_scale / temperature without softcap
        q = softmax(z)

    With i a token, c_k the words that the teacher lists for it, p_k = exp(teacher_log_prob_ik), and
    sums being over the listed words, `tail` says how the other words count:

        bucket: together they are one class more, with the probability 1 - sum(p_k) for the teacher
            and 1 - sum(q_c_k) for the student
        zero: the teacher gives each the probability 0, and the listed words p_k / sum(p_k)
        drop: they are left out on both sides: p_k / sum(p_k) against q_c_k / sum(q_c_k)

    and the result is that of `divergence` for these classes. For "zero" this is the divergence over
    the whole vocabulary, because the words to which the teacher gives the probability 0 can be
    summed in one term; reverse_kl would be inf and is refused. For "bucket" it is at most the
    divergence over the whole vocabulary, and equal to it if the teacher lists every word.

    The student's probability of the other words is computed from the logsumexp of their logits, not
    as a difference from 1. The teacher's is such a difference, and at least 1e-7: the probabilities
    that a confident teacher lists sum to 1 in float32, and would make reverse_kl inf. If every word
    is listed, there is no class of other words.

    An entry of teacher_ids below 0 is left out, so that tokens may list different numbers of words.
    If a word is listed twice, its first entry counts. A token without a word, or whose target is
    ignore_index, gives 0 and has gradients of exactly 0, whatever its logits are. A word that the
    student's vocabulary lacks has no logit: give a negative entry in its place.

    The logits are computed in x's dtype, and the result from them in float32. Forward and backward
    together take four products of M tokens, V words and D columns, and hold one chunk of logits:
    see `linear_log_prob` for chunks, sums and memory. Beside the result, K + 2 float32 numbers per
    token are stored for the student, and K + 1 for the teacher.

    teacher_log_prob is differentiable too.

    Under autocast x, weight, bias, lora_a and lora_b are cast as `torch.nn.functional.linear` casts
    them.

    This op calls `linear_top_k_divergence_forward` and `divergence_forward`.

    Args:
        x: (..., D), floating point, any strides: the student's hidden states.
        weight: (V, D), of x's dtype.
        teacher_ids: (..., K), int64 or int32; each below 0, or from 0 to V - 1.
        teacher_log_prob: (..., K), floating point: logarithms of the teacher's probabilities, at
            the temperature at which they are to be compared.
        bias: (V,), of x's dtype.
        target: (...), int64 or int32, or None. It is only compared with ignore_index.
        kind: "forward_kl", "reverse_kl", "jsd" or "tvd", as for `divergence`.
        beta: the teacher's weight in "jsd", from 0 to 1; at its ends that is forward_kl or
            reverse_kl.
        tail: "bucket", "zero" or "drop". With "drop" and K = 1 the result is 0.
        temperature: of the student, above 0. The result is not multiplied by its square.
        softcap: above 0, or None for no cap.
        logit_scale: above 0.
        ignore_index: the target of tokens that do not count.
        accum_dtype, chunk_bytes, lora_a, lora_b, lora_scale: as for `linear_log_prob`.

    Returns:
        (...), float32, or float64 if x or teacher_log_prob is.

    Raises:
        TypeError: x, teacher_log_prob, lora_a or lora_b is not floating point, weight or bias does
            not have x's dtype, or teacher_ids or target is not int64 or int32.
        ValueError: the shapes do not fit together, K is 0, or weight has no classes; one of
            lora_a and lora_b is given without the other; the devices differ; kind or tail is
            unknown; tail is "zero" with reverse_kl; beta is not from 0 to 1; temperature, softcap
            or logit_scale is not above 0 and finite; chunk_bytes is below 1; or accum_dtype is
            neither float32 nor x's dtype.
        IndexError: an entry of teacher_ids is V or more, on a CPU. Other devices give NaN, and do
            not read out of bounds.

    Source: Hinton et al., "Distilling the knowledge in a neural network", 2015; Agarwal et al.,
        "On-policy distillation of language models", 2024.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> ids, log_prob = torch.tensor([[3], [-1]]), torch.zeros(2, 1)
        >>> liger_ops.linear_top_k_divergence(x, weight, ids, log_prob, kind="forward_kl")
        tensor([1.3863, 0.0000])
    """
    op = "linear_top_k_divergence"
    check_teacher(op, x, teacher_ids, teacher_log_prob, target, kind, beta, tail)
    x, weight, bias = cast_as_linear(x, weight, bias)
    lora_x, lora_b = lora_input(op, x, weight, lora_a, lora_b, lora_scale)
    ids = distinct(teacher_ids, target, ignore_index)
    logits, rest, rest_error = linear_top_k_divergence_forward(
        x, weight, ids, bias, temperature, softcap, logit_scale, accum_dtype, chunk_bytes,
        lora_x, lora_b,
    )  # fmt: skip
    return divergence_of_classes(
        logits, rest, rest_error, teacher_log_prob, ids, kind, beta, tail, weight.shape[0]
    )


@library.forward(
    "x weight teacher_ids bias temperature softcap logit_scale accum_dtype chunk_bytes "
    "lora_x lora_b",
    returns="logits rest rest_error",
    axes="x=* D, weight=V D: x, teacher_ids=* K: int, bias=V: x, lora_x=* R: x, lora_b=V R: x -> "
    "logits=* K, rest=*, rest_error=*",
    dtype="float32+x",
    options={**OPTIONS, "chunk_bytes": ABOVE_0},
)
def linear_top_k_divergence_forward(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the student's part of `linear_top_k_divergence`.

    With the z of that op, these are the z of the listed words, and the logsumexp of the z of all
    other words. Their softmax, `torch.cat([logits, rest.unsqueeze(-1)], -1).softmax(-1)`, has the
    probability of each listed word, and of all others together. Autocast changes nothing here.

    The words of a token, in teacher_ids, must differ from each other. `linear_top_k_divergence`
    ensures this.

    Args:
        lora_x: (..., R), of x's dtype, whose product with lora_b is added to the logits.
        lora_b: (V, R), of x's dtype. Both, or neither.

    Returns:
        logits: (..., K), float32, or float64 if x is; -inf where an entry of teacher_ids is below
            0.
        rest: (...), of the same dtype; -inf if every word is listed, and 0 if none is. Both are
            differentiable.
        rest_error: (...), of the same dtype; the rounding error of rest, as the lse_error of
            `cross_entropy_forward`.

    Raises:
        TypeError, ValueError, IndexError: as `linear_top_k_divergence`.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_top_k_divergence_forward(x, weight, torch.tensor([[3, -1]]))
        (tensor([[0., -inf]]), tensor([1.0986]), tensor([0.]))
    """
    tokens = call.teacher_ids.shape[:-1]
    ids, parts = rows_of(call.teacher_ids).long(), []
    for chunk, _, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        parts.append(_split(_scaled(call, logits, ids[chunk]), ids[chunk]))
    listed, rest, error = (torch.cat(values) for values in zip(*parts, strict=True))
    return listed.reshape(call.teacher_ids.shape), rest.reshape(tokens), error.reshape(tokens)


@library.backward(
    "linear_top_k_divergence_forward",
    "dlogits? drest? x weight teacher_ids bias logits rest rest_error ... output_mask"
    " lora_x= lora_b= -> dx dweight dbias dlora_x dlora_b",
    returns=GRADIENTS,
)
def linear_top_k_divergence_backward(call: Any) -> Any:
    """Compute the gradient of `linear_top_k_divergence_forward`.

    The derivative of a listed word's result by its z is 1. For any other word c

        drest / dz_ic = exp((z_ic - rest_i) - rest_error_i)

    From dz, the gradients of the head follow as in `linear_log_prob_backward`. An entry of
    teacher_ids from V on is a word that weight lacks: its token counts, and it has no gradient.
    """
    ids = rows_of(call.teacher_ids).long()
    rest, rest_error = call.rest.reshape(-1), call.rest_error.reshape(-1)
    dlogits = None if call.dlogits is None else call.dlogits.reshape(ids.shape)
    drest = None if call.drest is None else call.drest.reshape(-1)
    cap, scale = tempered(call.temperature, call.softcap, call.logit_scale)

    def dlogits_of(chunk: Tensor, words: slice) -> Tensor:
        z = _scaled(call, chunk, ids)
        dz = _dz(dlogits, drest, z, ids, ids - words.start, rest, rest_error)
        if cap is not None:
            dz = dz * (1 - (z / cap).square())
        return (dz * scale).to(call.x.dtype)

    return gradients_by_words(call, dlogits_of)


def _scaled(call: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Return z.

    The logits of a token without a listed word are replaced by 0: they may be NaN, which would make
    the gradient NaN.
    """
    kept = torch.where((ids >= 0).any(-1, keepdim=True), logits, 0.0)
    return effective(kept, *tempered(call.temperature, call.softcap, call.logit_scale))


def _columns(ids: Tensor, z: Tensor) -> Tensor:
    """Return the columns of the listed words in z; V, one past the last, for words that z lacks."""
    V = z.shape[-1]
    return torch.where((ids >= 0) & (ids < V), ids, V)


def _listed(columns: Tensor, z: Tensor) -> Tensor:
    """Return whether each element of z is a listed word's."""
    V = z.shape[-1]
    none = torch.zeros((*z.shape[:-1], V + 1), dtype=torch.bool, device=z.device)
    return none.scatter(-1, columns, True)[..., :V]


def _split(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of the forward for rows of z."""
    with looked_up("teacher_ids", f"negative, or from 0 to {z.shape[-1] - 1}"):
        logits = z.gather(-1, ids.clamp(min=0))
    others = torch.where(_listed(_columns(ids, z), z), -float("inf"), z)
    counts = (ids >= 0).any(-1)
    rest, lost = (torch.where(counts, value, 0.0) for value in logsumexp(others))
    return torch.where(ids >= 0, logits, -float("inf")), rest, lost


def _dz(
    dlogits: Tensor | None, drest: Tensor | None, z: Tensor, ids: Tensor, here: Tensor,
    rest: Tensor, rest_error: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of a chunk of z; `here` are the ids counted from its first word."""
    dz = torch.zeros_like(z)
    if drest is not None:
        # If every word is listed, rest is -inf. Its gradient has no terms, and must not be NaN.
        finite = torch.where(rest == -float("inf"), 0.0, rest)
        log_p = log_softmax_of(z, finite, rest_error)
        p = torch.exp(torch.where(_listed(_columns(here, z), z), -float("inf"), log_p))
        drest = torch.where((ids >= 0).any(-1), drest, 0.0)
        dz = dz + drest.to(z.dtype).unsqueeze(-1) * p
    if dlogits is not None:
        dz = dz + at_words(dlogits, here, z)
    return dz


library.keep_dtypes_under_autocast(
    "linear_top_k_divergence_forward", "linear_top_k_divergence_backward"
)
