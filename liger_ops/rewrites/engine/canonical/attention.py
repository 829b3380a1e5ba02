"""The operations that attention is written with, besides arithmetic and views."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from .call import Call, dimension, spelled


def _softmax(op: str, input: Any, dim: Any, dtype: Any = None) -> Call:
    # The dtype is taken from the result's value, whether the call or autocast sets it.
    return Call(op, (input, dimension(input, dim)))


def _functional_softmax(
    op: str, input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None
) -> Call:
    return Call(op, (input, dimension(input, dim)))


for _name in ("softmax", "log_softmax"):
    _functions = getattr(torch, _name), getattr(torch.special, _name)
    spelled(*_functions, _name)(functools.partial(_softmax, _name))
    spelled(getattr(F, _name))(functools.partial(_functional_softmax, _name))


@spelled(torch.baddbmm, "baddbmm")
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Call:
    return Call("baddbmm", (input, batch1, batch2, beta, alpha))


@spelled(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Call:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    return Call("einsum", (equation, operands))


spelled(torch.bmm, "bmm")(lambda input, mat2: Call("matmul", (input, mat2)))
spelled(torch.masked_fill, "masked_fill")(
    lambda input, mask, value: Call("masked_fill", (input, mask, value))
)
spelled(torch.where)(lambda condition, input, other: Call("where", (condition, input, other)))
spelled("where")(lambda input, condition, other: Call("where", (condition, input, other)))
