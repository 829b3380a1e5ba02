"""lora_linear: the dtype of the LoRA factor a."""

from __future__ import annotations

from typing import Any

import torch

from . import checks
from .lines import also


@also("lora_linear")
def no_narrower_lora(call: Any) -> None:
    if torch.promote_types(call.x.dtype, call.a.dtype) != call.a.dtype:
        raise TypeError(
            f"{checks.op(call)}: a must have x's dtype, {call.x.dtype}, or a wider one, got"
            f" {call.a.dtype}"
        )
