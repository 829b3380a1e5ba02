"""The log-probabilities and divergences of a device's words: the ops' results and gradients, with
the numbers of all words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.heads.head import both, finished_in_forward, shaped, still_missing
from ...ops.heads.two_heads import (
    divisor,
    mixed,
    reduced,
    result_dtype,
    upstream_of_sum,
    upstream_of_tokens,
    weights_of_tokens,
)
from ...ops.losses.divergence import limit
from . import token_divergences, token_log_probs, token_top_k
from .collectives import gathered
from .lora import head_of_rows
from .products import Head
from .summed_divergence import again, cross_entropy_of
from .token_divergences import Found
from .token_statistics import Layer, of_logits
from .two_heads import Labels, Options, Side, Statistics, TwoHeads, joined
from .words import Words


def log_prob(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    """`log_prob_forward` of the logits of a device's words, or `linear_log_prob_forward`."""
    head, target, here, options = _log_prob(call, words)
    log_prob, entropy, lse, error = token_log_probs.results_of(head, target, here, words, options)
    valid = words.valid(call.target, call.ignore_index)
    return torch.where(valid, log_prob, float("nan")), entropy, lse, None, None, None, error


def log_prob_backward(call: Any, words: Words) -> Any:
    head, target, here, options = _log_prob(call, words)
    gradients = token_log_probs.gradients(
        head, target, here, (call.entropy, call.lse, call.lse_error),
        (call.dlog_prob, call.dentropy, call.dlse), words, options,
        getattr(call, "output_mask", [True] + [False] * 4),
    )  # fmt: skip
    return gradients if hasattr(call, "weight") else gradients[0]


def _log_prob(call: Any, words: Words) -> tuple[Layer, Tensor, Tensor, token_log_probs.Options]:
    head: Layer = _head(call) if hasattr(call, "weight") else of_logits(call.logits)
    target = words.local(call.target, call.ignore_index)
    return head, target, words.here(call.target), _options_of_tokens(call)


def _options_of_tokens(call: Any) -> token_log_probs.Options:
    return token_log_probs.Options(
        call.temperature, call.softcap, call.logit_scale,
        getattr(call, "accum_dtype", None), getattr(call, "chunk_bytes", None),
    )  # fmt: skip


def top_k(call: Any, words: Words) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_top_k_divergence_forward` of a device's words."""
    return token_top_k.results_of(_head(call), call.teacher_ids, words, _options_of_tokens(call))


def top_k_backward(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    given = (call.dlogits, call.drest, _head(call), call.teacher_ids, call.logits)
    rest, options = (call.rest, call.rest_error), _options_of_tokens(call)
    return token_top_k.gradients(*given, rest, words, options, call.output_mask)


def divergence(call: Any, words: Words) -> Found:
    """`divergence_forward` of the logits of a device's words."""
    given = (call.student_logits, call.teacher_logits, call.target)
    options = _options(call)
    ranks = gathered(token_divergences.local_statistics(*given, options), 0, words.group)
    return token_divergences.of_all_ranks(ranks, *given, words.group, options)


def divergence_backward(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    found = Found(*(getattr(call, name) for name in Found._fields))
    gradients = token_divergences.gradients(
        call.ddivergence, call.student_logits, call.teacher_logits, call.target, found,
        _options(call), call.output_mask,
    )  # fmt: skip
    return tuple(gradients)


def _options(call: Any) -> token_divergences.Options:
    temperatures = (call.temperature, call.teacher_temperature or call.temperature)
    kind = limit(call.kind, call.beta)
    return token_divergences.Options(kind, call.beta, *temperatures, call.ignore_index)


def linear_divergence(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    """`linear_divergence_forward` of a device's words."""
    student, heads, weights = _heads(call, words)
    gradients = heads.gradients(list(call.gradient_mask), False, True)
    upstream = upstream_of_sum(weights, call.soft_weight, call.hard_weight)
    chunks = []
    for chunk, found in heads.with_statistics():
        if any(call.gradient_mask):
            gradients.add(chunk.head, heads.dlogits(chunk, found, upstream))
        chunks.append(found)
    statistics, shape = joined(chunks), call.student_x.shape[:-1]
    items = divisor(call.reduction, weights, call.num_items_in_batch)
    of_reduction = (weights, items, call.reduction, shape)
    divergence, cross_entropy = reduced(statistics.found.divergence, *of_reduction), None
    of_labels = [torch.zeros_like(statistics.found.divergence)] * 2
    if statistics.lse is not None and statistics.lse_error is not None:
        cross_entropy = reduced(cross_entropy_of(statistics), *of_reduction)
        of_labels = [x.to(weights.dtype) for x in (statistics.lse, statistics.lse_error)]
    loss = mixed(divergence, cross_entropy, call.soft_weight, call.hard_weight)
    numbers = torch.stack([*statistics.found, *of_labels]).reshape(-1, *shape)
    computed = shaped(gradients.results(), student)
    return loss, divergence, cross_entropy, numbers, *computed, None


def linear_divergence_backward(call: Any, words: Words) -> tuple[Tensor | None, ...]:
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    # A mean's divisor is given here; the statistics have its dtype.
    items = divisor(call.reduction, call.statistics, call.num_items_in_batch)
    finished = finished_in_forward(
        call.dloss, computed, call.output_mask, call.target, call.ignore_index, items,
        call.student_x.dtype,
    )  # fmt: skip
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    student, heads, weights = _heads(call, words)
    upstream = upstream_of_tokens(
        call.dloss, call.ddivergence, call.dcross_entropy, call.target, call.ignore_index,
        weights, items, call.soft_weight, call.hard_weight,
    )  # fmt: skip
    *found, lse, error = call.statistics.flatten(1).unbind()
    if call.target is None:
        statistics = Statistics(Found(*found), None, None, None)
    else:
        statistics = Statistics(Found(*found), lse, error, None)
    made = again(heads, statistics, upstream, missing, False)
    return both(finished, shaped(made, student))


def _heads(call: Any, words: Words) -> tuple[Head, TwoHeads, Tensor]:
    """The student's head, it with its teacher, and the weights of the tokens."""
    student = _head(call, "student_")
    shape, dtype = (
        call.student_x.shape[:-1],
        result_dtype(call.student_x, call.teacher_x, call.teacher_logits),
    )
    teacher: Head | Tensor
    if call.teacher_logits is None:
        teacher = head_of_rows(*_head(call, "teacher_"))
    else:
        teacher = call.teacher_logits.reshape(shape.numel(), call.teacher_logits.shape[-1])
    labels, target = None, call.target
    if target is not None:
        local = words.local(target, call.ignore_index)
        valid = words.valid(target, call.ignore_index)
        labels = Labels(*(value.reshape(-1) for value in (local, words.here(target), valid)))
    of_tokens = (target, call.token_weight, call.ignore_index, shape, dtype)
    weights = weights_of_tokens(*of_tokens, call.student_x.device)
    teacher_temperature = call.teacher_temperature or call.temperature
    options = Options(
        limit(call.kind, call.beta), call.beta,
        Side(call.temperature, call.student_softcap, call.student_logit_scale),
        Side(teacher_temperature, call.teacher_softcap, call.teacher_logit_scale),
        call.accum_dtype, call.chunk_bytes,
    )  # fmt: skip
    return student, TwoHeads(head_of_rows(*student), teacher, labels, words, options), weights


def _head(call: Any, prefix: str = "") -> Head:
    names = ("x", "weight", "bias", "lora_x", "lora_b")
    return Head(*(getattr(call, f"{prefix}{name}") for name in names))
