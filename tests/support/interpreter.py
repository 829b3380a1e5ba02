"""Triton's interpreter, changed to round as devices do.

It truncates float32 to bfloat16, while every device rounds to nearest, ties to even. Its results
would miss error bounds that device code meets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 nearest to float32 values, as uint16, which the interpreter uses."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    to_nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + to_nearest_even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def patch() -> None:
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            data = round_to_bfloat16(source.data)
            return interpreter.TensorHandle(data, dtype.scalar)
        return cast(self, source, dtype)

    builder.cast_impl = cast_impl
