"""Activations, norms and matrix products, and what attention is composed of besides arithmetic and
views."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F

from ....torch_private import native_linear
from .call import IDENTITY, Call, as_tuple, calls, dimension, is_tensor, spelled


@spelled(F.silu)
def _silu(input: Any, inplace: Any = False) -> Call | None:
    return None if inplace else Call("silu", (input,))


@spelled(F.gelu)
def _gelu(input: Any, approximate: Any = "none") -> Call:
    return Call("gelu", (input, approximate))


@spelled(F.relu, torch.relu, "relu")
def _relu(input: Any, inplace: Any = False) -> Call | None:
    return None if inplace else Call("relu", (input,))


@spelled(F.dropout)
def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Call | None:
    return Call(IDENTITY, (input,)) if (p == 0 or not training) and not inplace else None


@spelled(torch.dropout)
def _torch_dropout(input: Any, p: Any, train: Any) -> Call | None:
    return _dropout(input, p, train)


@spelled(F.rms_norm, torch.rms_norm)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Call:
    return Call("rms_norm", (input, as_tuple(normalized_shape), weight, eps))


@spelled(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None,
    bias: Any = None, eps: Any = 1e-5, cudnn_enable: Any = True,
) -> Call:  # fmt: skip
    return Call("layer_norm", (input, as_tuple(normalized_shape), weight, bias, eps))


@spelled(F.group_norm, torch.group_norm)
def _group_norm(
    input: Any, num_groups: Any, weight: Any = None,
    bias: Any = None, eps: Any = 1e-5, cudnn_enabled: Any = True,
) -> Call:  # fmt: skip
    return Call("group_norm", (input, num_groups, weight, bias, eps))


@spelled(F.linear, native_linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return Call("linear", (input, weight, bias))


@spelled(operator.matmul, torch.matmul, "matmul", "__matmul__")
def _matmul(input: Any, other: Any) -> Call:
    turned = calls(other, "transpose")
    if turned is not None and is_tensor(turned.args[0], dim=2) and is_tensor(input):
        return Call("linear", (input, turned.args[0], None), (other,))
    return Call("matmul", (input, other))


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
