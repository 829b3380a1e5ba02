"""moe_experts: the rows of gate_up, the two factors of a LoRA, and the layout of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.tensors import equal, is_transposed
from . import checks
from .lines import also, gives


@also("moe_experts")
def rows_of_gate_up(call: Any) -> None:
    is_gated = call.activation != "relu_squared"
    if call.interleaved and not is_gated:
        raise ValueError(f"{checks.op(call)}: interleaved must be False without a gate, got True")
    rows = (2 if is_gated else 1) * call.down.shape[2]
    if not equal(call.gate_up.shape[1:2], (rows,), f"{checks.op(call)}: gate_up"):
        raise ValueError(
            f"{checks.op(call)}: gate_up must have {rows} rows for each expert, for down of"
            f" {tuple(call.down.shape)} and {call.activation!r}, got {call.gate_up.shape[1]}"
        )


@also("moe_experts")
def whole_loras(call: Any) -> None:
    for prefix in ("gate_up", "down"):
        names = [f"{prefix}_lora_a", f"{prefix}_lora_b"]
        missing = [name for name in names if getattr(call, name) is None]
        if len(missing) == 1:
            names.remove(missing[0])
            raise ValueError(
                f"{checks.op(call)}: {missing[0]} must be given with {names[0]}, got None"
            )


@gives("like", "moe_experts")
def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialised dense tensor like `tensor`; if that is a stack of transposed
    matrices, the new one is too."""
    if tensor.dim() == 3 and is_transposed(tensor):
        return checks.like(tensor.mT, dtype).mT
    return checks.like(tensor, dtype)
