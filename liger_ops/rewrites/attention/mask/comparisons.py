"""Rules of comparisons of two tensors, or of a tensor and a number.

PyTorch compares in the dtype of the result of arithmetic, and converts a number to the dtype of the
tensor: as uint8, -1 is 255.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...engine.canonical import value as traced
from ...engine.casts import represents
from ...engine.maps.algebra import (
    Affine,
    Number,
    Size,
    Unknown,
    Value,
    affine,
    at_least,
    equal,
    lift,
    negation,
    number,
)
from ..numbers import rounded
from .rules import rule, shape_of

if TYPE_CHECKING:
    from .evaluate import IndexFunctions


def comparison(name: str, function: Callable[..., Value], *more: str) -> None:
    """Register the rule of a comparison of two numbers."""

    def apply(functions: IndexFunctions, node: fx.Node, x: Any, y: Any) -> Value:
        dtype = torch.result_type(_typed(x), _typed(y))
        return lift(
            function, *(_converted(functions, operand, shape_of(node), dtype) for operand in (x, y))
        )

    rule(name, *more)(apply)


def _typed(operand: Any) -> Any:
    """Return a value by which PyTorch selects a dtype: a constant for a symbol, to add no guard."""
    example = traced(operand)
    if isinstance(example, (torch.SymInt, torch.SymFloat)):
        return 0 if isinstance(example, torch.SymInt) else 0.0
    if not isinstance(example, (Tensor, int, float)):
        raise Unknown(f"{operand} is not a number that is known at compile time")
    return example


def _converted(
    functions: IndexFunctions, operand: Any, shape: Sequence[Size], dtype: torch.dtype
) -> Number:
    """Return an operand as `dtype` stores it, such as float32 for an integer tensor and 0.5."""
    example = traced(operand)
    is_exact = isinstance(example, Tensor) and represents(dtype, example.dtype)

    def converted(leaf: Affine) -> Affine:
        constant = leaf.constant
        if is_exact or dtype == torch.bool:
            return leaf
        if leaf.is_constant and isinstance(constant, (int, float)):
            if dtype.is_floating_point:
                return affine(rounded(float(constant), dtype))
            if torch.iinfo(dtype).min <= constant <= torch.iinfo(dtype).max:
                return leaf
        # No size and no index is too large for these dtypes.
        elif not leaf.terms and dtype in (torch.int64, torch.int32):
            return leaf
        raise Unknown(f"it compares numbers that {dtype} may round or overflow")

    return lift(converted, number(functions.shaped(operand, shape)))


comparison("ge", at_least, "greater_equal")
comparison("le", lambda x, y: at_least(y, x), "less_equal")
comparison("lt", lambda x, y: negation(at_least(x, y)), "less")
comparison("gt", lambda x, y: negation(at_least(y, x)), "greater")
comparison("eq", equal)
comparison("ne", lambda x, y: negation(equal(x, y)), "not_equal")
