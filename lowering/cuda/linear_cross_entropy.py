"""linear_cross_entropy: cuBLAS's products between the kernels of cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import library
from .. import linear_cross_entropy as by_chunks
from . import cross_entropy

# cuBLAS reads and writes by 16 bytes where rows start at multiples of that, as those of an odd
# vocabulary would not; Triton knows multiples of 16 elements.
ALIGNMENT = 16


@library.kernel("linear_cross_entropy_forward", "cuda")
def linear_cross_entropy_forward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return by_chunks.forward(cross_entropy, ALIGNMENT, *args, **kwargs)


@library.kernel("linear_cross_entropy_backward", "cuda")
def linear_cross_entropy_backward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    return by_chunks.backward(cross_entropy, ALIGNMENT, *args, **kwargs)
