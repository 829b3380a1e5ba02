"""Whether a definition may reuse memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import is_differentiated
from ..torch_private import len_torch_dispatch_stack


def is_eager(*tensors: Tensor) -> bool:
    """Whether nothing traces, differentiates or transforms what is computed from these tensors, so
    that it may be written in place, and computed by kernels of ATen in which nothing else sees the
    intermediate values."""
    return not (
        is_differentiated()
        or torch.compiler.is_compiling()
        or len_torch_dispatch_stack()
        or any(type(tensor) is not Tensor for tensor in tensors)
    )
