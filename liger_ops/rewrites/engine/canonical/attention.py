"""The operations that attention is written with, besides arithmetic and views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .call import Call, dimension, spelled


@spelled(torch.softmax, torch.special.softmax, "softmax")
def _softmax(input: Any, dim: Any, dtype: Any = None) -> Call:
    # The dtype is taken from the result's value, whether the call or autocast sets it.
    return Call("softmax", (input, dimension(input, dim)))


@spelled(F.softmax)
def _functional_softmax(
    input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None
) -> Call:
    return Call("softmax", (input, dimension(input, dim)))


@spelled(torch.bmm, "bmm")
def _bmm(input: Any, mat2: Any) -> Call:
    return Call("matmul", (input, mat2))


@spelled(torch.baddbmm, "baddbmm")
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Call:
    return Call("baddbmm", (input, batch1, batch2, beta, alpha))


@spelled(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Call:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    return Call("einsum", (equation, operands))


@spelled(torch.masked_fill, "masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Call:
    return Call("masked_fill", (input, mask, value))


@spelled(torch.where)
def _where(condition: Any, input: Any, other: Any) -> Call:
    return Call("where", (condition, input, other))


@spelled("where")
def _where_method(input: Any, condition: Any, other: Any) -> Call:
    return Call("where", (condition, input, other))
