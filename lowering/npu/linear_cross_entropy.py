"""linear_cross_entropy: aclnn's products between the kernels of cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from ...ops.head import scale
from .. import linear_cross_entropy as by_chunks
from . import cross_entropy

# aclnn would write rows that do not follow each other by way of a copy.
ALIGNMENT = 1


@library.kernel("linear_cross_entropy_forward", "npu")
def linear_cross_entropy_forward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return by_chunks.forward(cross_entropy, ALIGNMENT, *args, **kwargs)


@library.kernel("linear_cross_entropy_backward", "npu")
def linear_cross_entropy_backward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return by_chunks.backward(cross_entropy, scale, ALIGNMENT, *args, **kwargs)
