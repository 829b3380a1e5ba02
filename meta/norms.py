"""Norms: options whose accepted values depend on the tensors, and the rows of scale and shift of
modulated norms.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import checks
from .checks import op
from .lines import also


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


@also("modulated_rms_norm", "modulated_layer_norm", shapes=("scale", "shift"))
def modulation(call: Any) -> None:
    if not _has_rows_of_samples(call.x, call.scale):
        raise ValueError(
            f"{checks.op(call)}: scale must be (N,), or x's first dimensions and N, for x of shape"
            f" {tuple(call.x.shape)}, got {tuple(call.scale.shape)}"
        )
    checks.shape(call, "shift", call.scale.shape, "scale")


def _has_rows_of_samples(x: Tensor, scale: Tensor) -> bool:
    """Return whether each row of scale belongs to the same number of neighbouring rows of x."""
    if not 1 <= scale.dim() <= x.dim() or scale.shape[-1] != x.shape[-1]:
        return False
    leading = list(scale.shape[:-1])
    while leading and leading[-1] == 1:
        leading.pop()
    if leading == list(x.shape[: len(leading)]):
        return True
    # x's batch and positions are flattened to rows, and scale has a row for each of the batch.
    return x.dim() == 2 and leading[0] > 0 and x.shape[0] % leading[0] == 0
