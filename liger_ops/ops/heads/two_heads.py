"""The definition of linear_divergence, a chunk of logits at a time.

The weights of the tokens and the reductions serve the kernels' host code too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ..losses.cross_entropy import effective, logsumexp
from ..losses.divergence import RESULTS
from .head import Head, rows_of

_DIVERGENCE = library.OPS["divergence_forward"].definition
_DIVERGENCE_GRADIENT = library.OPS["divergence_backward"].definition
_LOG_PROB = library.OPS["log_prob_forward"].definition
_LOSS = library.OPS["cross_entropy_forward"].definition
_LOSS_GRADIENT = library.OPS["cross_entropy_backward"].definition


def result_dtype(call: Any) -> torch.dtype:
    tensors = (call.student_x, call.teacher_x, call.teacher_logits)
    double = any(t is not None and t.dtype is torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


def token_weights(call: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of each token, in the tokens' shape; 0 for an ignored token."""
    target = call.target
    if call.token_weight is not None:
        weights = call.token_weight.to(dtype)
        if target is not None:
            weights = torch.where(target != call.ignore_index, weights, 0.0)
    elif target is not None:
        weights = (target != call.ignore_index).to(dtype)
    else:
        x = call.student_x
        weights = torch.ones(x.shape[:-1], dtype=dtype, device=x.device)
    return weights


def divisor(call: Any, weights: Tensor) -> Tensor | int:
    """Return the number by which the reduction divides the sum of the tokens' values.

    It is 1 for a mean over nothing, which is 0.
    """
    if call.reduction != "mean":
        return 1
    if call.num_items_in_batch is not None:
        return call.num_items_in_batch.to(weights.dtype)
    # A sum of ones is avoided: in a compiled graph Inductor computes it in a kernel that Triton 3.6
    # fails to compile, in TritonGPURemoveLayoutConversions.
    all_are_one = call.target is None and call.token_weight is None
    total = weights.new_full((), weights.numel()) if all_are_one else weights.sum()
    return torch.where(total == 0, 1.0, total)


def weights_and_items(call: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | int]:
    """Return the weights of the tokens, (M,), and the reduction's divisor."""
    weights = token_weights(call, dtype)
    return weights.reshape(-1), divisor(call, weights)


def reduced(call: Any, values: Tensor, weights: Tensor, items: Tensor | int) -> Tensor:
    weighted = values * weights
    if call.reduction == "none":
        return weighted.reshape(call.student_x.shape[:-1])
    return weighted.sum() / items


def mixed(call: Any, divergence: Tensor, cross_entropy: Tensor | None) -> Tensor:
    """Return the loss. A term whose weight is 0 is left out: it may be inf or NaN."""
    if cross_entropy is None or call.hard_weight == 0:
        return divergence * call.soft_weight
    hard = cross_entropy * call.hard_weight
    return hard if call.soft_weight == 0 else divergence * call.soft_weight + hard


def upstream_of_sum(call: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of each token's divergence and cross-entropy in the sum of all losses.

    A term that is left out of the loss has None.
    """
    soft, hard = (None if w == 0 else w * weights for w in (call.soft_weight, call.hard_weight))
    return soft, hard


def upstream_of_tokens(
    call: Any, weights: Tensor, items: Tensor | int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of each token's own divergence and cross-entropy.

    They are (M,) and contiguous, or None without a gradient.
    """
    upstreams: list[Tensor | None] = []
    terms = ((call.soft_weight, call.ddivergence), (call.hard_weight, call.dcross_entropy))
    for weight, grad in terms:
        left_out = call.dloss is None or weight == 0
        parts = [] if left_out else [call.dloss.to(weights.dtype) * weight]
        parts += [] if grad is None else [grad.to(weights.dtype)]
        if not parts:
            upstreams.append(None)
            continue
        factor = sum(parts[1:], parts[0]) / items
        upstream = factor.reshape(-1).expand(weights.shape) * weights
        if call.target is not None:
            # An ignored token has no gradient, even if num_items_in_batch is 0.
            upstream = torch.where(call.target.reshape(-1) != call.ignore_index, upstream, 0.0)
        upstreams.append(upstream)
    return upstreams[0], upstreams[1]


def chunks_of_logits(call: Any) -> Iterator[tuple[slice, Head, Tensor, Tensor, Tensor | None]]:
    """Yield each chunk of tokens, its part of the student's head, both logits, and the targets."""
    teacher_logits, teacher, other_bytes = call.teacher_logits, None, 0
    if teacher_logits is None:
        teacher = Head.of_call(call, "teacher_")
        other_bytes = teacher.token_bytes
    else:
        teacher_logits = rows_of(teacher_logits)
    targets = None if call.target is None else call.target.reshape(-1)
    student = Head.of_call(call, "student_")
    for tokens, part, logits in student.chunks_of_tokens(call.chunk_bytes, other_bytes):
        taught = teacher_logits[tokens] if teacher is None else teacher.of_tokens(tokens).logits()
        yield tokens, part, logits, taught, None if targets is None else targets[tokens]


def _effective(call: Any, student: Tensor, teacher: Tensor, target: Tensor | None) -> list[Tensor]:
    """Return the scaled and capped logits of student and teacher.

    The logits of an ignored token are replaced by 0: they may be NaN, which would make the gradient
    NaN.
    """
    if target is not None:
        within = (target != call.ignore_index).unsqueeze(-1)
        student, teacher = (torch.where(within, logits, 0.0) for logits in (student, teacher))
    return [
        effective(student, call.student_softcap, call.student_logit_scale),
        effective(teacher, call.teacher_softcap, call.teacher_logit_scale),
    ]


def _divergence_args(call: Any, student: Tensor, teacher: Tensor) -> dict[str, Any]:
    """Return arguments of `divergence`: its options, and both logits, padded to all classes.

    A class that one side lacks gets the probability 0 there, or for cosine the logit 0.
    """
    V = max(student.shape[-1], teacher.shape[-1])
    missing = 0.0 if call.kind == "cosine" else -float("inf")
    student, teacher = (
        F.pad(x, (0, V - x.shape[-1]), value=missing) if x.shape[-1] < V else x
        for x in (student, teacher)
    )
    names = ("kind", "beta", "temperature", "teacher_temperature", "ignore_index")
    options = {name: getattr(call, name) for name in names}
    return {"student_logits": student, "teacher_logits": teacher, **options}


def values_of(
    call: Any, student: Tensor, teacher: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the divergence and the cross-entropy of each token, and the statistics."""
    z, teacher_z = _effective(call, student, teacher, target)
    divergence, *others = _DIVERGENCE(target=target, **_divergence_args(call, z, teacher_z))
    loss, of_labels = None, [torch.zeros_like(divergence)] * 2
    if target is not None:
        loss, _, lse, *_, error = _LOSS(z, target, ignore_index=call.ignore_index, reduction="none")
        ignored = target == call.ignore_index
        of_labels = [torch.where(ignored, 0.0, x).to(divergence.dtype) for x in (lse, error)]
    return divergence, loss, torch.stack([divergence, *others, *of_labels]).detach()


def entropy_of(call: Any, student: Tensor, target: Tensor | None) -> Tensor:
    """Return the entropy of each token's distribution, without a gradient."""
    ignore_index = call.ignore_index
    if target is None:
        target, ignore_index = student.new_zeros(student.shape[0], dtype=torch.int64), -1
    options = (call.temperature, call.student_softcap, call.student_logit_scale, ignore_index)
    return _LOG_PROB(student.detach(), target, *options)[1]


def dlogits_of(
    call: Any, upstream: Sequence[Tensor | None], student: Tensor, teacher: Tensor,
    target: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the student's logits, in their dtype.

    `upstream` are the gradients of the divergence and of the cross-entropy, each of which may be
    None.
    """
    soft, hard = upstream
    z, teacher_z = _effective(call, student, teacher, target)
    dz = torch.zeros_like(z)
    if soft is not None:
        # With None for the forward's results, the definition of the backward computes them itself.
        saved = dict.fromkeys(RESULTS.split())
        options = {**_divergence_args(call, z, teacher_z), **saved, "output_mask": [True, False]}
        dz = _DIVERGENCE_GRADIENT(ddivergence=soft, target=target, **options)[0][..., : z.shape[-1]]
    if hard is not None:
        assert target is not None
        lse, lse_error = logsumexp(z)
        dz = dz + _LOSS_GRADIENT(
            hard, None, None, None, z, target, None, None, None, lse, lse_error, hard.sum(),
            call.ignore_index, "none", 0.0, 0.0, None, 1.0,
        )  # fmt: skip
    if call.student_softcap is not None:
        dz = dz * (1 - (z / call.student_softcap).square())
    return (dz * call.student_logit_scale).to(student.dtype)
