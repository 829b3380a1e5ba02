"""What the device can do at most: how fast it copies, and how fast it multiplies matrices."""

from __future__ import annotations

import torch

from .device import Accelerator
from .timing import Effort, Spread, interleaved

EFFORT = Effort(rounds=25, seconds=3.0)
COPIED_BYTES = 2**31
MATRIX = 8192


def copy_rate(accelerator: Accelerator) -> Spread:
    """GB/s, bytes read and bytes written."""
    count = min(COPIED_BYTES, accelerator.free_memory() // 4) // 4
    source = torch.randn(count, device=accelerator.kind)
    target = torch.empty_like(source)
    times, failures = interleaved(
        accelerator, {"copy": lambda: lambda: target.copy_(source)}, EFFORT
    )
    if failures:
        raise RuntimeError(failures["copy"])
    return times["copy"].map(lambda ms: 2 * source.nbytes / ms / 1e6)


def matrix_rate(accelerator: Accelerator, dtype: torch.dtype) -> Spread:
    """TFLOP/s of a square product of random matrices: of zeros it would be faster."""
    a, b = (torch.randn(MATRIX, MATRIX, device=accelerator.kind, dtype=dtype) for _ in range(2))
    times, failures = interleaved(accelerator, {"product": lambda: lambda: a @ b}, EFFORT)
    if failures:
        raise RuntimeError(failures["product"])
    return times["product"].map(lambda ms: 2 * MATRIX**3 / ms / 1e9)
