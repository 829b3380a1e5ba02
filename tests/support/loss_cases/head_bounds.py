"""Bounds of the errors of heads whose logits are computed again."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import op_checks
from op_under_test import Tensors, max_abs


def logits_of(case: Any, tensors: Tensors) -> Tensor:
    """The scaled and capped logits, in float64."""
    x, weight, bias = (op_checks.in_float64(tensors[name]) for name in ("x", "weight", "bias"))
    logits = F.linear(x, weight, bias) * case.logit_scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    return logits / case.temperature


def rounding(case: Any, logits: Tensor) -> float:
    """What rounding the logits to their dtype, and float32, may change a scaled logit by."""
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    # The rounding error of tanh is relative to 1.
    size = max_abs(logits) + ((case.softcap or 0) + math.log(case.V)) / case.temperature
    return (eps + 16 * eps32) * size


def assert_no_further(
    label: str, output: Tensor, reference: Tensor, truth: Tensor, roundings: float
) -> None:
    """No further from truth than twice the definition in the same dtypes, and a few roundings."""
    assert (output.shape, output.dtype) == (reference.shape, reference.dtype), label
    if truth.numel() == 0:
        return
    assert torch.equal(output.isnan(), truth.isnan()), label
    own = max_abs((reference.double() - truth).nan_to_num())
    error = max_abs((output.double() - truth).nan_to_num())
    assert error <= 2 * own + roundings, f"{label}: {error} of at most 2 * {own} + {roundings}"


def gradient_bounds(case: Any, tensors: Tensors, bounds: Tensor, terms: Tensor) -> dict[str, float]:
    """The errors of the head's gradients, from the bounds of the errors of the gradient of the
    logits and the size of the terms of that, both (M, V)."""
    x, weight = (tensors[name].double().abs() for name in ("x", "weight"))
    sums = 0.0
    if case.accumulate_narrow:
        # One rounding of the sum for each chunk, at most one a word.
        sums = torch.finfo(case.dtype).eps * case.V * max_abs(terms @ weight)
    return {
        "x": max_abs(bounds @ weight) + sums,
        "weight": max_abs(bounds.T @ x.reshape(-1, case.D)),
        "bias": max_abs(bounds.sum(0)),
    }
