"""Teachers that list some words of each token, with their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import equal, widened
from .cross_entropy import logsumexp
from .divergence import DISTRIBUTION_KINDS, divergence_forward, limit

TAILS = ("bucket", "zero", "drop")
# The least probability that the teacher leaves to all other words. It is a difference of 1 and the
# listed probabilities, and not known more precisely.
LEAST_TAIL = 1e-7


def distinct(ids: Tensor, target: Tensor | None, ignore_index: int) -> Tensor:
    """Return the words as int64, with -1 in place of those that do not count.

    These are entries below 0, words that occur earlier in their row, and the rows of ignored
    tokens.
    """
    if target is not None:
        ids = ids.masked_fill((target == ignore_index).unsqueeze(-1), -1)
    ids = ids.long().clamp(min=-1)
    return ids.masked_fill(repeated(ids), -1)


def repeated(words: Tensor) -> Tensor:
    """Return for each word whether it occurs earlier in its row."""
    # The sort is stable, so that only the later ones of equal words count as repeated.
    ordered, columns = words.sort(dim=-1, stable=True)
    first = torch.zeros_like(ordered[..., :1], dtype=torch.bool)
    again = torch.cat((first, ordered[..., 1:] == ordered[..., :-1]), -1)
    return torch.zeros_like(again).scatter(-1, columns, again)


def divergence_of_classes(
    logits: Tensor, rest: Tensor, rest_error: Tensor, log_prob: Tensor, ids: Tensor,
    kind: str, beta: float, tail: str, V: int,
) -> Tensor:  # fmt: skip
    """Compute the divergence of each token.

    logits, rest and rest_error are the student's part, as `linear_top_k_divergence_forward` returns
    it. log_prob is the teacher's, of the words `ids` from a vocabulary of V, as `distinct` returns
    them.
    """
    student = logits
    if tail != "drop":
        # Logits relative to their largest have the same divergence, and do not swallow the small
        # rest_error that is added.
        classes = torch.cat([logits, rest.unsqueeze(-1)], -1)
        highest = classes.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(rest.dtype).min)
        error = rest_error.to(rest.dtype).unsqueeze(-1)
        listed, others = (classes - highest).split([logits.shape[-1], 1], -1)
        student = torch.cat([listed, others + error], -1)
    teacher = teacher_classes(log_prob, ids, tail, V)
    counts = torch.where((ids < 0).all(-1), -100, 0)
    return divergence_forward(student, teacher, counts, kind, beta)[0]


def teacher_classes(log_prob: Tensor, ids: Tensor, tail: str, V: int) -> Tensor:
    """Return the teacher's log-probabilities of the listed words and, last, of all other words.

    Their softmax is the teacher's distribution. With the tail "drop" there is no last class.
    """
    log_p = widened(log_prob).masked_fill(ids < 0, -float("inf"))
    if tail == "drop":
        return log_p
    if tail == "zero":
        rest = torch.full_like(log_p[..., :1], -float("inf"))
    else:
        listed = logsumexp(log_p)[0].clamp(max=-LEAST_TAIL)
        rest = torch.log(-torch.expm1(listed))
        # If all V words are listed, the class of other words has probability 0, not LEAST_TAIL.
        rest = rest.masked_fill((ids >= 0).sum(-1) == V, -float("inf")).unsqueeze(-1)
    return torch.cat([log_p, rest], -1)


def check_teacher(
    op: str, x: Tensor, ids: Tensor, log_prob: Tensor, target: Tensor | None,
    kind: str, beta: float, tail: str,
) -> None:  # fmt: skip
    """Raise if an argument is wrong that `linear_top_k_divergence` does not pass to another op."""
    for name, tensor in (("teacher_ids", ids), ("target", target)):
        if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: {name} must be int64 or int32, got {tensor.dtype}")
    if not log_prob.is_floating_point():
        raise TypeError(
            f"{op}: teacher_log_prob must be a floating point tensor, got {log_prob.dtype}"
        )
    tensors = {"teacher_ids": ids, "teacher_log_prob": log_prob, "target": target}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device, {x.device}, got {tensor.device}")
    if ids.dim() < 1 or ids.shape[-1] < 1:
        raise ValueError(
            f"{op}: teacher_ids must be (..., K) with at least one word, got {tuple(ids.shape)}"
        )
    if not equal(log_prob.shape, ids.shape, f"{op}: teacher_log_prob"):
        raise ValueError(
            f"{op}: teacher_log_prob must have the shape of teacher_ids, {tuple(ids.shape)}, got"
            f" {tuple(log_prob.shape)}"
        )
    if target is not None and not equal(target.shape, ids.shape[:-1], f"{op}: target"):
        raise ValueError(
            f"{op}: target must have the shape of teacher_ids but for its last dimension,"
            f" {tuple(ids.shape[:-1])}, got {tuple(target.shape)}"
        )
    for name, value, accepted in (("kind", kind, DISTRIBUTION_KINDS), ("tail", tail, TAILS)):
        if value not in accepted:
            names = ", ".join(map(repr, accepted))
            raise ValueError(f"{op}: {name} must be one of {names}, got {value!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta must be from 0 to 1, got {beta}")
    if tail == "zero" and limit(kind, beta) == "reverse_kl":
        raise ValueError(
            f"{op}: tail must be 'bucket' or 'drop' for reverse_kl, which is inf where the"
            " teacher's probability is 0, got 'zero'"
        )
