"""linear_top_k_divergence: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from .. import checks
from .linear_cross_entropy import HEAD, check_chunks, check_layer, check_lora, check_mask


@library.fake("linear_top_k_divergence_forward")
def linear_top_k_divergence_forward(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(call)
    dtype = torch.float64 if call.x.dtype is torch.float64 else torch.float32
    logits = call.x.new_empty(call.teacher_ids.shape, dtype=dtype)
    rest, error = (call.x.new_empty(call.teacher_ids.shape[:-1], dtype=dtype) for _ in range(2))
    return logits, rest, error


@library.fake("linear_top_k_divergence_backward")
def linear_top_k_divergence_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    check_mask(call, "output_mask", HEAD)
    names = ("dlogits", "drest", "logits", "rest", "rest_error")
    checks.floating(call, *names)
    checks.same_device(call, "x", *names)
    for name in ("dlogits", "logits"):
        checks.shape(call, name, call.teacher_ids.shape, "teacher_ids")
    for name in ("drest", "rest", "rest_error"):
        checks.shape(
            call, name, call.teacher_ids.shape[:-1], "teacher_ids but for its last dimension"
        )
    return checks.gradients(call, *HEAD)


def _check(call: Any) -> None:
    check_layer(call)
    op, ids = checks.op(call), call.teacher_ids
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: teacher_ids must be int64 or int32, got {ids.dtype}")
    checks.same_device(call, "x", "teacher_ids")
    if ids.dim() < 1 or ids.shape[-1] < 1:
        raise ValueError(
            f"{op}: teacher_ids must be (..., K) with at least one word, got {tuple(ids.shape)}"
        )
    meaning = "x but for its last dimension, and of the words"
    checks.shape(call, "teacher_ids", (*call.x.shape[:-1], ids.shape[-1]), meaning)
    check_lora(call)
    check_chunks(call, call.weight)
    checks.positive(call, "temperature", "softcap", "logit_scale")
