"""Activations, norms, matrix products, classification losses and what models compose these of, and
the operations of attention that are neither arithmetic nor views.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from ....torch_private import native_grouped_mm, native_linear
from .call import IDENTITY, Call, calls, declared, dimension, is_tensor, spelled

declared("silu", "input inplace!=False", F.silu)
declared("gelu", "input approximate='none'", F.gelu)
declared("relu", "input inplace!=False", F.relu, torch.relu, "relu")
declared("rms_norm", "input normalized_shape weight=None eps=None", F.rms_norm, torch.rms_norm)
declared(
    "layer_norm", "input normalized_shape weight=None bias=None eps=1e-5 cudnn_enable?=True",
    F.layer_norm, torch.layer_norm,
)  # fmt: skip
declared(
    "group_norm", "input num_groups weight=None bias=None eps=1e-5 cudnn_enabled?=True",
    F.group_norm, torch.group_norm,
)  # fmt: skip
declared("linear", "input weight bias=None", F.linear, native_linear)
declared("matmul", "input mat2", torch.bmm, "bmm")
declared(
    "grouped_mm", "input mat2 offs=None bias!=None out_dtype!=None", native_grouped_mm, F.grouped_mm
)
declared("baddbmm", "input batch1 batch2 beta=1 alpha=1", torch.baddbmm, "baddbmm")
declared("masked_fill", "input mask value", torch.masked_fill, "masked_fill")
declared("where", "condition input other", torch.where)
for _name in ("softmax", "log_softmax"):
    # The dtype is left out: patterns read it from the result's example value, where it also shows
    # if autocast set it.
    _functions = getattr(torch, _name), getattr(torch.special, _name)
    declared(_name, "input dim dtype?=None", *_functions, _name)
    declared(_name, "input dim=None _stacklevel?=3 dtype?=None", getattr(F, _name))


@spelled(F.dropout)
def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Call | None:
    return Call(IDENTITY, (input,)) if (p == 0 or not training) and not inplace else None


@spelled(torch.dropout)
def _torch_dropout(input: Any, p: Any, train: Any) -> Call | None:
    return _dropout(input, p, train)


@spelled(operator.matmul, torch.matmul, "matmul", "__matmul__")
def _matmul(input: Any, other: Any) -> Call:
    transposed = calls(other, "transpose")
    if transposed is not None and is_tensor(transposed.args[0], dim=2) and is_tensor(input):
        return Call("linear", (input, transposed.args[0], None), (other,))
    return Call("matmul", (input, other))


@spelled(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Call:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    return Call("einsum", (equation, operands))


spelled("where")(lambda input, condition, other: Call("where", (condition, input, other)))


_OPTIONS = "size_average!=None ignore_index=-100 reduce!=None reduction='mean'"
declared(
    "cross_entropy", f"input target weight=None {_OPTIONS} label_smoothing=0.0", F.cross_entropy
)
declared("nll_loss", f"input target weight=None {_OPTIONS}", F.nll_loss)
declared(
    "logsumexp", "input dim+ keepdim=False", torch.logsumexp, torch.special.logsumexp, "logsumexp"
)
declared("gather", "input dim index sparse_grad!=False", torch.gather, "gather")
spelled(torch.take_along_dim, "take_along_dim")(
    lambda input, indices, dim=None: Call("gather", (input, dimension(input, dim), indices))
)
declared("full_like", "input fill_value", torch.full_like)
declared("scatter", "input dim index src", torch.scatter, "scatter", "scatter_")
declared("scatter_add", "input dim index src", torch.scatter_add, "scatter_add", "scatter_add_")
declared("sort", "input dim=-1 descending=False stable?=False", torch.sort, "sort")
declared("topk", "input k dim=-1 largest=True sorted?=True", torch.topk, "topk")
declared("histc", "input bins=100 min=0 max=0", torch.histc, "histc")
declared("cumsum", "input dim dtype=None", torch.cumsum, "cumsum")
declared("sum", "input dim+=None keepdim=False dtype=None", torch.sum, "sum")
