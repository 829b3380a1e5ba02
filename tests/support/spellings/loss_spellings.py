"""Losses of logits and of a head as models spell them, for tests of the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriting import values

B, S, D, V = 2, 5, 8, 11
Loss = Callable[[Tensor, Tensor], Any]


def labels(rows: int = B, length: int = S) -> Tensor:
    """Return labels, every third of which is ignored."""
    target = torch.arange(rows * length) % V
    target[::3] = -100
    return target.view(rows, length)


def inputs(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Return logits and labels."""
    return [values(rows, length, V, dtype=dtype), labels(rows, length)]


def head_inputs(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Return hidden states, the head's weight, and labels."""
    x, weight = values(rows, length, D, dtype=dtype), values(V, D, dtype=dtype)
    return [x, weight, labels(rows, length)]


def with_head(loss: Loss) -> Callable[..., Any]:
    return lambda x, weight, target: loss(F.linear(x, weight), target)


def plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), target.view(-1))


def transformers(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the loss as ForCausalLMLoss, which shifts the labels, not the logits."""
    logits = logits.float()
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, logits.shape[-1])
    return F.cross_entropy(logits, shifted.view(-1), ignore_index=-100, reduction="mean")


def sliced(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, V), target[..., 1:].contiguous().view(-1))
