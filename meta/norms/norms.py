"""Norms: options whose accepted values depend on the tensors."""

from __future__ import annotations

from typing import Any

from ..checks import op
from ..lines import also


@also("rms_norm", "fused_add_rms_norm", "modulated_rms_norm", "rms_norm_rope")
def offset(call: Any) -> None:
    for name in ("weight", "q_weight", "k_weight"):
        if getattr(call, name, call) is None and call.offset != 0:
            raise ValueError(
                f"{op(call)}: offset must be 0 without {name}, to which it is added, got"
                f" {call.offset}"
            )


@also("gated_rms_norm")
def group_size(call: Any) -> None:
    N, size = call.x.shape[-1], call.group_size
    if size is not None and (size < 1 or N % size != 0):
        raise ValueError(f"{op(call)}: group_size must be a divisor of x's {N} columns, got {size}")


@also("group_norm")
def num_groups(call: Any) -> None:
    channels, groups = call.x.shape[1], call.num_groups
    if groups < 1 or channels % groups != 0:
        raise ValueError(
            f"{op(call)}: num_groups must be a divisor of x's {channels} channels, got {groups}"
        )
