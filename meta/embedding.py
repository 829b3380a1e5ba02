"""embedding: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from . import checks
from .lines import also


@also("embedding")
def embedding(call: Any) -> None:
    _check_padding(call, call.weight.shape[0])


@library.fake("embedding_backward")
def embedding_backward(call: Any) -> Tensor:
    dy, indices = call.dy, call.indices
    checks.floating(call, "dy")
    checks.at_least_dims(call, "dy", 1, "(..., D)")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{checks.op(call)}: indices must be int64 or int32, got {indices.dtype}")
    checks.same_device(call, "dy", "indices")
    checks.shape(call, "dy", (*indices.shape, dy.shape[-1]), "indices and D")
    if call.num_embeddings < 0:
        raise ValueError(
            f"{checks.op(call)}: num_embeddings must be at least 0, got {call.num_embeddings}"
        )
    _check_padding(call, call.num_embeddings)
    return dy.new_empty((call.num_embeddings, dy.shape[-1]), requires_grad=False)


def _check_padding(call: Any, rows: int | torch.SymInt) -> None:
    padding_idx = call.padding_idx
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(
            f"{checks.op(call)}: padding_idx must be an index of {rows} rows, got {padding_idx}"
        )
