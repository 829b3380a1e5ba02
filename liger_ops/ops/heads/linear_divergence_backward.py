"""The gradient of linear_divergence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from .gradients import gradients_of_definition
from .head import Head, both, finished_in_forward, shaped, still_missing
from .two_heads import (
    chunks_of_logits,
    divisor,
    dlogits_of,
    teacher_of,
    token_weights,
    upstream_of_tokens,
)

GRADIENTS = "dx dweight dbias dlora_x dlora_b"


@library.define(returns=GRADIENTS)
def linear_divergence_backward(
    dloss: Tensor | None, ddivergence: Tensor | None, dcross_entropy: Tensor | None,
    student_x: Tensor, student_weight: Tensor,
    teacher_x: Tensor | None, teacher_weight: Tensor | None,
    student_bias: Tensor | None, teacher_bias: Tensor | None,
    teacher_logits: Tensor | None, target: Tensor | None,
    token_weight: Tensor | None, num_items_in_batch: Tensor | None,
    statistics: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
    kind: str, beta: float, temperature: float, teacher_temperature: float | None,
    student_softcap: float | None, teacher_softcap: float | None,
    student_logit_scale: float, teacher_logit_scale: float,
    soft_weight: float, hard_weight: float, ignore_index: int, reduction: str,
    accum_dtype: torch.dtype | None, chunk_bytes: int | None, output_mask: list[bool],
    student_lora_x: Tensor | None = None, student_lora_b: Tensor | None = None,
    teacher_lora_x: Tensor | None = None, teacher_lora_b: Tensor | None = None,
    dlora_x: Tensor | None = None, dlora_b: Tensor | None = None,
) -> tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """The gradient of `linear_divergence_forward`.

    A gradient that the forward computed and that is given here is multiplied by dloss and the
    reduction's factor, in float32, and rounded once. The others are computed from recomputed
    logits: by the definition a chunk of tokens at a time, by kernels a chunk of words, whose
    gradients of student_weight, student_bias and student_lora_b are complete. With q_i the softmax
    of z_i at temperature 1:

        dz_ic = soft_i * dstudent_ic of `divergence_backward` + hard_i * (q_ic - (c == target_i))
        dlogits_ic = dz_ic * logit_scale * (1 - (z_ic / softcap)**2), in student_x's dtype
        dx = dlogits @ weight
        dweight = sum over the chunks of dlogits.T @ x
        dbias = sum(dlogits, 0)
        dlora_x = dlogits @ lora_b
        dlora_b = sum over the chunks of dlogits.T @ lora_x

    where soft_i and hard_i are the gradients of the token's divergence and cross-entropy.

    Args:
        dloss, ddivergence, dcross_entropy: the gradients of the forward's results, floating point,
            of the shapes of these results, any strides; each may be None.
        statistics: a result of the forward. Kernels use it; the definition computes it again, so
            that it can be differentiated.
        dx, dweight, dbias, dlora_x, dlora_b: results of the forward, or None: for the reduction
            "none", and if another result than loss has a gradient.
        output_mask: whether dx, dweight, dbias, dlora_x and dlora_b are computed and allocated.
        The others: as given to the forward.

    Returns:
        dx, dweight, dbias, dlora_x and dlora_b, contiguous, of the shape and dtype of student_x,
        student_weight, student_bias, student_lora_x and student_lora_b; or None.

    Raises:
        TypeError, ValueError: as `linear_divergence`; or output_mask asks for the gradient of a
            tensor that is None.
    """
    tokens = (target, token_weight, num_items_in_batch)
    weights, items = weights_and_items(student_x, *tokens, statistics, ignore_index, reduction)
    weights = weights.reshape(-1)
    computed = (dx, dweight, dbias, dlora_x, dlora_b)
    finished = finished_in_forward(
        dloss, computed, output_mask, target, ignore_index, items, student_x.dtype
    )
    missing = still_missing(output_mask, finished)
    if not any(missing):
        return tuple(finished)  # type: ignore[return-value]
    upstream = upstream_of_tokens(
        dloss, ddivergence, dcross_entropy, target, ignore_index,
        weights, items, soft_weight, hard_weight,
    )  # fmt: skip
    options = (
        kind, beta, temperature, teacher_temperature, student_softcap, teacher_softcap,
        student_logit_scale, teacher_logit_scale, ignore_index,
    )  # fmt: skip
    head = (student_x, student_weight, student_bias, student_lora_x, student_lora_b)
    lora = (teacher_lora_x, teacher_lora_b)
    taught = teacher_of(teacher_x, teacher_weight, teacher_bias, *lora, teacher_logits)
    gradients = gradients_of_definition(student_weight, missing, accum_dtype)
    for chunk, chunk_head, student, teacher, targets in chunks_of_logits(
        Head.of(*head), taught, target, chunk_bytes
    ):
        soft, hard = (None if grad is None else grad[chunk] for grad in upstream)
        dlogits = dlogits_of(soft, hard, student, teacher, targets, *options)
        gradients.add(chunk_head, dlogits)
    return both(finished, shaped(gradients.results(), head))  # type: ignore[return-value]


def weights_and_items(
    student_x: Tensor, target: Tensor | None, token_weight: Tensor | None,
    num_items_in_batch: Tensor | None, statistics: Tensor, ignore_index: int, reduction: str,
) -> tuple[Any, Any]:  # fmt: skip
    """The weights of the tokens, of their shape, and what the reduction divides by."""
    shape, dtype = student_x.shape[:-1], statistics.dtype
    tokens = (target, token_weight, ignore_index, shape, dtype, student_x.device)
    weights = token_weights(*tokens)
    return weights, divisor(reduction, weights, num_items_in_batch)
