"""embedding: the number of rows of weight's gradient, and the range of padding_idx."""

from __future__ import annotations

from typing import Any

import torch

from .checks import op
from .lines import also, gives


@gives("V", "embedding")
def rows_of_gradient(call: Any) -> tuple[int | torch.SymInt]:
    return (call.num_embeddings,)


@also("embedding")
def padding(call: Any) -> None:
    rows = call.weight.shape[0] if hasattr(call, "weight") else call.num_embeddings
    if rows < 0:
        raise ValueError(f"{op(call)}: num_embeddings must be at least 0, got {rows}")
    if call.padding_idx is not None and not -rows <= call.padding_idx < rows:
        raise ValueError(
            f"{op(call)}: padding_idx must be an index of {rows} rows, got {call.padding_idx}"
        )
