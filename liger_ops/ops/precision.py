"""The dtype in which the definitions compute."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in the dtype of its arithmetic: float64 for float64, float32 for everything narrower."""
    return x if x.dtype is torch.float64 else x.float()
