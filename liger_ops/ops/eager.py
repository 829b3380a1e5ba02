"""Whether a definition may reuse memory."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from ..torch_private import are_functorch_transforms_active, len_torch_dispatch_stack


def is_eager(*tensors: Tensor) -> bool:
    """Whether nothing traces, differentiates or transforms what is computed from these tensors, so
    that it may be written in place, and computed by kernels of ATen in which nothing else sees the
    intermediate values."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or len_torch_dispatch_stack()
        or any(type(tensor) is not Tensor for tensor in tensors)
    )
