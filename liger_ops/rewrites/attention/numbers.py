"""Constants in a graph: the numbers that scores are multiplied by, capped with or filled with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import arguments, operation, value

# The position of the number among the arguments of a function that stores one in a tensor.
_NUMBER_POSITION = {"tensor": 0, "scalar_tensor": 0, "full": 1, "new_full": 2, "full_like": 1}


def constant(argument: Any) -> float | None:
    """Return a number that is known at compile time, or None.

    It may be stored in a 0-dimensional tensor of floating-point numbers, which may round it.
    """
    example = value(argument)
    if isinstance(argument, fx.Node) and isinstance(example, Tensor):
        position = _NUMBER_POSITION.get(operation(argument) or "")
        args = arguments(argument)
        if (
            position is None
            or position >= len(args)
            or example.dim()
            or not example.is_floating_point()
        ):
            return None
        stored = constant(args[position])
        return None if stored is None else rounded(stored, example.dtype)
    if isinstance(example, bool) or not isinstance(example, (int, float, torch.SymFloat)):
        return None
    if isinstance(example, torch.SymFloat) and example.node.hint is None:
        # The item of a tensor: it has no value while tracing.
        return None
    # Dynamo keeps floats symbolic with dynamic=True; this adds the guard that it has this value.
    return float(example)


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return the number that a tensor of a floating-point dtype stores for `number`."""
    return float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype))


def scale_of_call(scale: Any, head_dim: Any) -> float | None:
    """Return the number by which a call of scaled_dot_product_attention multiplies its scores.

    Return None if it is not known. For a symbolic `head_dim` return 1 in the place of the default:
    callers only ask whether the scale is one that every engine accepts.
    """
    if scale is not None:
        return constant(float(scale) if isinstance(scale, bool) else scale)
    size = head_dim if isinstance(head_dim, int) else 1
    return 1.0 / math.sqrt(size) if size > 0 else None
