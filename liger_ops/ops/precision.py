"""The dtype in which the definitions compute."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Cast x to the dtype of the arithmetic: float64 if x is float64, else float32."""
    return x if x.dtype is torch.float64 else x.float()
