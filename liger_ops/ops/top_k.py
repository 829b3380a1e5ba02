"""A teacher that gives some words of each token, with their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy import logsumexp
from .divergence import DISTRIBUTION_KINDS, limit
from .precision import widened
from .shapes import equal

OP = "linear_top_k_divergence"
TAILS = ("bucket", "zero", "drop")
# What the teacher leaves to other words is a difference from 1, and not known more precisely.
LEAST_TAIL = 1e-7


def distinct(ids: Tensor) -> Tensor:
    """The words as int64, -1 for every entry below 0 and for a word that its row has before."""
    ids = ids.long().clamp(min=-1)
    # The first of equal words stays before the others.
    ordered, places = ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ids.masked_fill(torch.zeros_like(repeated).scatter(-1, places, repeated), -1)


def teacher_classes(log_prob: Tensor, ids: Tensor, tail: str, V: int) -> Tensor:
    """The logarithms of the teacher's probabilities of the listed words and, last, of all others of
    the V words; their softmax is the teacher's distribution."""
    log_p = widened(log_prob).masked_fill(ids < 0, -float("inf"))
    if tail == "drop":
        return log_p
    if tail == "zero":
        rest = torch.full_like(log_p[..., :1], -float("inf"))
    else:
        listed = logsumexp(log_p).clamp(max=-LEAST_TAIL)
        rest = torch.log(-torch.expm1(listed))
        # There may be no other words.
        rest = rest.masked_fill((ids >= 0).sum(-1) == V, -float("inf")).unsqueeze(-1)
    return torch.cat([log_p, rest], -1)


def check_teacher(
    x: Tensor, ids: Tensor, log_prob: Tensor, target: Tensor | None,
    kind: str, beta: float, tail: str,
) -> None:  # fmt: skip
    """Check what `linear_top_k_divergence` does not pass on."""
    for name, tensor in (("teacher_ids", ids), ("target", target)):
        if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{OP}: {name} must be int64 or int32, got {tensor.dtype}")
    if not log_prob.is_floating_point():
        raise TypeError(
            f"{OP}: teacher_log_prob must be a floating point tensor, got {log_prob.dtype}"
        )
    given = {"teacher_ids": ids, "teacher_log_prob": log_prob, "target": target}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{OP}: {name} must be on x's device, {x.device}, got {tensor.device}")
    if ids.dim() < 1 or ids.shape[-1] < 1:
        raise ValueError(
            f"{OP}: teacher_ids must be (..., K) with at least one word, got {tuple(ids.shape)}"
        )
    if not equal(log_prob.shape, ids.shape, f"{OP}: teacher_log_prob"):
        raise ValueError(
            f"{OP}: teacher_log_prob must have the shape of teacher_ids, {tuple(ids.shape)}, got"
            f" {tuple(log_prob.shape)}"
        )
    if target is not None and not equal(target.shape, ids.shape[:-1], f"{OP}: target"):
        raise ValueError(
            f"{OP}: target must have the shape of teacher_ids but for its last dimension,"
            f" {tuple(ids.shape[:-1])}, got {tuple(target.shape)}"
        )
    for name, value, accepted in (("kind", kind, DISTRIBUTION_KINDS), ("tail", tail, TAILS)):
        if value not in accepted:
            names = ", ".join(map(repr, accepted))
            raise ValueError(f"{OP}: {name} must be one of {names}, got {value!r}")
    if not 0 <= beta <= 1:
        raise ValueError(f"{OP}: beta must be from 0 to 1, got {beta}")
    if tail == "zero" and limit(kind, beta) == "reverse_kl":
        raise ValueError(
            f"{OP}: tail must be 'bucket' or 'drop' for reverse_kl, which is inf where the"
            " teacher's probability is 0, got 'zero'"
        )
