"""log_prob: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks


def results(call: Any, x: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the results of the forward; x is the logits or the linear layer's input."""
    dtype, tokens = torch.float64 if x.dtype is torch.float64 else torch.float32, call.target.shape
    asked = (True, True, True, call.return_mean_logits, call.return_log_sum_sq_probs)
    floats = (x.new_empty(tokens, dtype=dtype) if wanted else None for wanted in asked)
    predicted = x.new_empty(tokens, dtype=torch.int64) if call.return_predicted else None
    return *floats, predicted, x.new_empty(tokens, dtype=dtype)


def check_gradients(call: Any, x: str) -> None:
    """Check a backward op's arguments that are results of the forward, or gradients of these."""
    names = ("dlog_prob", "dentropy", "dlse", "entropy", "lse", "lse_error")
    checks.floating(call, *names)
    checks.same_device(call, x, *names)
    for name in names:
        checks.shape(call, name, call.target.shape, "target")
