"""Losses of hidden states and a head: which tensors a call must have together, the dtype in which
gradients are summed, and the allocation of the gradients that a forward computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.heads.gradients import gradient_dtypes
from ..ops.heads.head import HEAD, trained
from . import checks
from .lines import also, gives

LOSSES = (
    "linear_cross_entropy", "linear_log_prob", "linear_top_k", "linear_top_k_divergence",
    "linear_score_centering", "linear_divergence",
)  # fmt: skip


@also(*LOSSES[:-1], first=True)
def given(call: Any) -> None:
    """Check that both factors of a LoRA are given, or none, and that no mask asks for the gradient
    of an argument that is None."""
    op, heads = checks.op(call), [trained(call)]
    if hasattr(call, "teacher_x"):
        heads.append(tuple(f"teacher_{name}" for name in HEAD))
    for *_, lora_x, lora_b in heads:
        for name, other in ((lora_x, lora_b), (lora_b, lora_x)):
            if getattr(call, name) is None and getattr(call, other) is not None:
                raise ValueError(f"{op}: {name} must be given with {other}, got None")
    for mask in ("gradient_mask", "output_mask"):
        wanted = list(getattr(call, mask, ()))
        for i, (name, is_wanted) in enumerate(zip(heads[0], wanted, strict=False)):
            if is_wanted and getattr(call, name) is None:
                raise ValueError(f"{op}: {mask}[{i}] must be False without a {name}, got {wanted}")


@also("linear_divergence", first=True)
def teacher(call: Any) -> None:
    op = checks.op(call)
    must = "the teacher must be given by teacher_logits or by teacher_x and teacher_weight"
    head = [name for name, _ in checks.given(call, ("teacher_x", "teacher_weight"))]
    if call.teacher_logits is not None:
        others = checks.given(call, [f"teacher_{name}" for name in HEAD])
        if others:
            raise ValueError(f"{op}: {must}, not both, got {others[0][0]} beside teacher_logits")
    elif len(head) < 2:
        raise ValueError(f"{op}: {must}, got {head[0] if head else 'none of these'}")
    if call.hard_weight != 0 and call.target is None:
        raise ValueError(f"{op}: hard_weight must be 0 without a target, got {call.hard_weight}")
    given(call)


@also(*LOSSES)
def accumulation(call: Any) -> None:
    """Check that the vocabulary has at least one word, accum_dtype, and gradient_mask."""
    for name in ("weight", "student_weight", "teacher_weight"):
        if getattr(call, name, None) is not None:
            checks.at_least_one(call, name, "class", dim=0)
    for name, element in (("teacher_ids", "word"), ("teacher_logits", "class")):
        if getattr(call, name, None) is not None:
            checks.at_least_one(call, name, element)
    dtype = getattr(call, trained(call)[1]).dtype
    accepted = {dtype, torch.float64 if dtype is torch.float64 else torch.float32}
    if call.accum_dtype is not None and call.accum_dtype not in accepted:
        names = " or ".join(sorted(map(str, accepted)))
        raise ValueError(
            f"{checks.op(call)}: accum_dtype must be {names} or None, got {call.accum_dtype}"
        )
    mask = list(getattr(call, "gradient_mask", ()))
    if any(mask) and call.reduction == "none":
        raise ValueError(
            f"{checks.op(call)}: gradient_mask must be all False for the reduction 'none', whose"
            f" gradient the backward computes, got {mask}"
        )


@also("linear_top_k")
def number_of_words(call: Any) -> None:
    V = call.weight.shape[0]
    if hasattr(call, "k") and call.k > V:
        raise ValueError(f"linear_top_k: k must be at most the number of words, {V}, got {call.k}")


@gives("K", "linear_top_k")
def columns_of_words(call: Any) -> tuple[int | torch.SymInt, ...]:
    return (call.k,) if hasattr(call, "k") else tuple(call.words.shape[-1:])


@also("linear_score_centering")
def importance(call: Any) -> None:
    """Check the bounds of the importance weights, and that the sampler's log-probabilities are
    given if there are weights."""
    kind = getattr(call, "importance_sampling", "none")
    if kind != "none" and call.sampling_log_prob is None:
        raise TypeError(
            "linear_score_centering: sampling_log_prob must be a tensor if importance_sampling is"
            f" not 'none', got None and {kind!r}"
        )
    if hasattr(call, "importance_max") and not call.importance_max >= call.importance_min:
        raise ValueError(
            "linear_score_centering: importance_max must be at least importance_min,"
            f" {call.importance_min}, got {call.importance_max}"
        )


@gives("W", "linear_score_centering")
def sampled_and_listed(call: Any) -> tuple[int | torch.SymInt, ...]:
    """Return the number of words of a token: the sampled one and those that are listed."""
    return (call.words.shape[-1] + 1,)


@gives("gradients", "linear_cross_entropy", "linear_divergence", "linear_score_centering")
def forward_gradients(call: Any) -> tuple[Tensor | None, ...]:
    """Allocate the gradients that the forward computes."""
    names = trained(call)
    weight, mask = getattr(call, names[1]), call.gradient_mask
    dtypes = gradient_dtypes(weight, mask, call.accum_dtype, in_forward=True)
    return tuple(
        None if dtype is None else checks.like(getattr(call, name), dtype)
        for name, dtype in zip(names, dtypes, strict=True)
    )
