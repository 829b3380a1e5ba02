"""clamped_swiglu and tiled_mlp: checks of several arguments together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import checks
from .lines import also


@also("clamped_swiglu")
def interleaved(call: Any) -> None:
    if call.interleaved and call.up is not None:
        raise ValueError(
            f"{checks.op(call)}: interleaved must be False with an up beside gate, got True"
        )


@also("tiled_mlp")
def same_dtype(call: Any) -> None:
    tensors = {name: value for name, value in call._asdict().items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.dtype != call.x.dtype:
            raise ValueError(
                f"{checks.op(call)}: {name} must have x's dtype, {call.x.dtype}, got {tensor.dtype}"
            )
