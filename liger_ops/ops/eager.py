"""The test by which a definition decides whether it may reuse memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import is_differentiated
from ..torch_private import len_torch_dispatch_stack


def is_eager(*tensors: Tensor) -> bool:
    """Return whether nothing traces, differentiates or transforms the computation on these tensors.

    The computation may then write to its intermediate tensors in place, and may use kernels of ATen
    that hide intermediate values from a trace or a transform.
    """
    return not (
        is_differentiated()
        or torch.compiler.is_compiling()
        or len_torch_dispatch_stack()
        or any(type(tensor) is not Tensor for tensor in tensors)
    )
