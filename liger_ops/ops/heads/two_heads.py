"""The definition of linear_divergence a chunk of logits at a time, and, for its kernels' host code
too, the weights of its tokens and its reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ..losses.cross_entropy import effective, logsumexp
from .head import Head, rows_of

_DIVERGENCE = library.OPS["divergence_forward"].definition
_DIVERGENCE_GRADIENT = library.OPS["divergence_backward"].definition
_LOG_PROB = library.OPS["log_prob_forward"].definition
_LOSS = library.OPS["cross_entropy_forward"].definition
_LOSS_GRADIENT = library.OPS["cross_entropy_backward"].definition


def result_dtype(x: Tensor, *teacher: Tensor | None) -> torch.dtype:
    double = any(t is not None and t.dtype is torch.float64 for t in (x, *teacher))
    return torch.float64 if double else torch.float32


def weights_of_tokens(
    target: Tensor | None, token_weight: Tensor | None, ignore_index: int,
    shape: Any, dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """`token_weights`, (M,)."""
    return token_weights(target, token_weight, ignore_index, shape, dtype, device).reshape(-1)


def token_weights(
    target: Tensor | None, token_weight: Tensor | None, ignore_index: int,
    shape: Any, dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """The weight of each token, 0 for those that are ignored, of this shape."""
    if token_weight is not None:
        weights = token_weight.to(dtype)
        if target is not None:
            weights = torch.where(target != ignore_index, weights, 0.0)
    elif target is not None:
        weights = (target != ignore_index).to(dtype)
    else:
        weights = torch.ones(shape, dtype=dtype, device=device)
    return weights


def divisor(
    reduction: str, weights: Tensor, num_items_in_batch: Tensor | None, all_one: bool = False
) -> Tensor | int:
    """The number by which a reduction divides the sum of the tokens' values; 1 for a mean over
    nothing, which is 0. `all_one`: every weight is known to be 1."""
    if reduction != "mean":
        return 1
    if num_items_in_batch is not None:
        return num_items_in_batch.to(weights.dtype)
    # Not a sum of ones where a compiled graph would have it: Inductor computes it in a kernel that
    # Triton 3.6 fails to compile, in TritonGPURemoveLayoutConversions.
    total = weights.new_full((), weights.shape[0]) if all_one else weights.sum()
    return torch.where(total == 0, 1.0, total)


def reduced(
    values: Tensor, weights: Tensor, items: Tensor | int, reduction: str, shape: Any
) -> Tensor:
    weighted = values * weights
    return weighted.reshape(shape) if reduction == "none" else weighted.sum() / items


def mixed(
    divergence: Tensor, cross_entropy: Tensor | None, soft_weight: float, hard_weight: float
) -> Tensor:
    """The loss. A term whose weight is 0 is left out, and may be inf or NaN."""
    if cross_entropy is None or hard_weight == 0:
        return divergence * soft_weight
    hard = cross_entropy * hard_weight
    return hard if soft_weight == 0 else divergence * soft_weight + hard


def upstream_of_sum(
    weights: Tensor, soft_weight: float, hard_weight: float
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of each token's divergence and cross-entropy, if that of the sum of the tokens'
    losses is 1; None for a term that is left out of the loss."""
    soft, hard = (None if w == 0 else w * weights for w in (soft_weight, hard_weight))
    return soft, hard


def upstream_of_tokens(
    dloss: Tensor | None, ddivergence: Tensor | None, dcross_entropy: Tensor | None,
    target: Tensor | None, ignore_index: int, weights: Tensor, items: Tensor | int,
    soft_weight: float, hard_weight: float,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of each token's own divergence and cross-entropy, (M,) and contiguous, or None
    if there is none."""
    found: list[Tensor | None] = []
    for weight, grad in ((soft_weight, ddivergence), (hard_weight, dcross_entropy)):
        parts = [] if dloss is None or weight == 0 else [dloss.to(weights.dtype) * weight]
        parts += [] if grad is None else [grad.to(weights.dtype)]
        if not parts:
            found.append(None)
            continue
        factor = sum(parts[1:], parts[0]) / items
        upstream = factor.reshape(-1).expand(weights.shape) * weights
        if target is not None:
            # An ignored token has no gradient, even if num_items_in_batch is 0.
            upstream = torch.where(target.reshape(-1) != ignore_index, upstream, 0.0)
        found.append(upstream)
    return found[0], found[1]


def teacher_of(
    teacher_x: Tensor | None, teacher_weight: Tensor | None, teacher_bias: Tensor | None,
    lora_x: Tensor | None, lora_b: Tensor | None, teacher_logits: Tensor | None,
) -> Head | Tensor:  # fmt: skip
    """The teacher's head, or its logits as (M, W)."""
    if teacher_x is not None and teacher_weight is not None:
        return Head.of(teacher_x, teacher_weight, teacher_bias, lora_x, lora_b)
    assert teacher_logits is not None
    return rows_of(teacher_logits)


def chunks_of_logits(
    student: Head, teacher: Head | Tensor, target: Tensor | None, chunk_bytes: int | None
) -> Iterator[tuple[slice, Head, Tensor, Tensor, Tensor | None]]:
    """Yield each chunk of tokens, its part of the student's head, the student's logits, the
    teacher's, and the targets."""
    teacher_bytes = teacher.token_bytes if isinstance(teacher, Head) else 0
    targets = None if target is None else target.reshape(-1)
    for tokens, part, logits in student.chunks_of_tokens(chunk_bytes, teacher_bytes):
        if isinstance(teacher, Head):
            taught = teacher.of_tokens(tokens).logits()
        else:
            taught = teacher[tokens]
        yield tokens, part, logits, taught, None if targets is None else targets[tokens]


def _effective(
    student: Tensor, teacher: Tensor, target: Tensor | None, student_softcap: float | None,
    teacher_softcap: float | None, student_logit_scale: float, teacher_logit_scale: float,
    ignore_index: int,
) -> list[Tensor]:  # fmt: skip
    """The scaled and capped logits of student and teacher, from 0 where the token is ignored: its
    logits may be NaN, which would make its gradient NaN."""
    if target is not None:
        within = (target != ignore_index).unsqueeze(-1)
        student, teacher = (torch.where(within, logits, 0.0) for logits in (student, teacher))
    return [
        effective(student, student_softcap, student_logit_scale),
        effective(teacher, teacher_softcap, teacher_logit_scale),
    ]


def _as_long(student: Tensor, teacher: Tensor, kind: str) -> list[Tensor]:
    """Both logits with all classes, those that one side lacks having the probability 0, or for
    cosine the logit 0."""
    V = max(student.shape[-1], teacher.shape[-1])
    missing = 0.0 if kind == "cosine" else -float("inf")
    return [
        F.pad(x, (0, V - x.shape[-1]), value=missing) if x.shape[-1] < V else x
        for x in (student, teacher)
    ]


def values_of(
    student: Tensor, teacher: Tensor, target: Tensor | None,
    kind: str, beta: float, temperature: float, teacher_temperature: float | None,
    student_softcap: float | None, teacher_softcap: float | None,
    student_logit_scale: float, teacher_logit_scale: float, ignore_index: int,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The divergence and the cross-entropy of each token, and the statistics."""
    caps = (student_softcap, teacher_softcap, student_logit_scale, teacher_logit_scale)
    z, teacher_z = _effective(student, teacher, target, *caps, ignore_index)
    options = (kind, beta, temperature, teacher_temperature, ignore_index)
    results = _DIVERGENCE(*_as_long(z, teacher_z, kind), target, *options)
    loss, of_labels = None, [torch.zeros_like(results[0])] * 2
    if target is not None:
        loss, _, lse, *_, error = _LOSS(z, target, None, None, None, ignore_index, "none")
        ignored = target == ignore_index
        of_labels = [torch.where(ignored, 0.0, x).to(results[0].dtype) for x in (lse, error)]
    return results[0], loss, torch.stack([*results, *of_labels]).detach()


def entropy_of(
    student: Tensor, target: Tensor | None, temperature: float, softcap: float | None,
    logit_scale: float, ignore_index: int,
) -> Tensor:  # fmt: skip
    """The entropy of each token's distribution, without a gradient."""
    if target is None:
        target, ignore_index = student.new_zeros(student.shape[0], dtype=torch.int64), -1
    options = (temperature, softcap, logit_scale, ignore_index)
    return _LOG_PROB(student.detach(), target, *options)[1]


def dlogits_of(
    soft: Tensor | None, hard: Tensor | None,
    student: Tensor, teacher: Tensor, target: Tensor | None,
    kind: str, beta: float, temperature: float, teacher_temperature: float | None,
    student_softcap: float | None, teacher_softcap: float | None,
    student_logit_scale: float, teacher_logit_scale: float, ignore_index: int,
) -> Tensor:  # fmt: skip
    """The gradient of the student's logits, in their dtype."""
    caps = (student_softcap, teacher_softcap, student_logit_scale, teacher_logit_scale)
    z, teacher_z = _effective(student, teacher, target, *caps, ignore_index)
    options = (kind, beta, temperature, teacher_temperature, ignore_index)
    dz = torch.zeros_like(z)
    if soft is not None:
        # That definition computes the forward's results where they are not given.
        saved = (None,) * 6
        inputs = (*_as_long(z, teacher_z, kind), target, *saved, *options)
        dlong, _ = _DIVERGENCE_GRADIENT(soft, *inputs, [True, False])
        dz = dlong[..., : z.shape[-1]]
    if hard is not None:
        assert target is not None
        grads = (hard, None, None, None)
        dz = dz + _LOSS_GRADIENT(
            *grads, z, target, None, None, None, *logsumexp(z), hard.sum(),
            ignore_index, "none", 0.0, 0.0, None, 1.0,
        )  # fmt: skip
    if student_softcap is not None:
        dz = dz * (1 - (z / student_softcap).square())
    return (dz * student_logit_scale).to(student.dtype)
