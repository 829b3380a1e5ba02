"""modulated_rms_norm and modulated_layer_norm: the rows of scale and shift."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from ..lines import also


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
