"""Correct first: the distance from float64, and how much of it is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of the relative error in norm. bfloat16: one rounding is 1.7e-3, and peers sum the gradient of a
# weight in bfloat16, part by part; float32: sums in another order, and fast exponentials.
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Wrong(Exception):
    """A provider does not compute the op."""


def relative_error(found: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The largest, over outputs and gradients, of |found - truth| / |truth| in norm; NaN if any."""
    if len(found) != len(truths):
        raise Wrong(f"wrong: it gives {len(found)} outputs and gradients, not {len(truths)}")
    errors = []
    for value, truth in zip(found, truths, strict=True):
        if value.shape != truth.shape:
            raise Wrong(f"wrong: it gives shape {tuple(value.shape)}, not {tuple(truth.shape)}")
        scale = float(truth.norm())
        distance = float((value.double() - truth).norm())
        errors.append(distance / scale if scale else distance)
    return max(errors, key=lambda error: float("inf") if error != error else error)


def check(error: float, dtype: torch.dtype) -> None:
    """Raise Wrong for a relative error above the bound, and for NaN."""
    bound = BOUNDS[dtype]
    if not error <= bound:
        raise Wrong(f"wrong: relative error {error:.1e}, allowed {bound:.0e}")
