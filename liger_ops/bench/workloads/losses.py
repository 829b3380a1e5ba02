"""cross_entropy and linear_cross_entropy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from . import models
from .entry import Draw, Entry, Function, Shape, wide

# Of the logits that the truth holds in float64 at once: a gigabyte.
LOGITS_AT_ONCE = 2**27


def model_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), target)


def model_head_and_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return model_loss(x @ weight.T, target)


def truth_by_rows(
    definition: Function, tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor]:
    """The mean loss and its gradients in float64, a part of the rows at a time.

    Of (rows, weights..., target) the first and the last are divided; no token is ignored.
    """
    *floats, target = tensors
    leaves = [t.detach().double().requires_grad_() for t in floats]
    classes = leaves[1].shape[0] if len(leaves) > 1 else leaves[0].shape[1]
    rows = len(target)
    step = max(1, LOGITS_AT_ONCE // classes)
    total = torch.zeros((), dtype=torch.float64, device=target.device)
    for start in range(0, rows, step):
        part = target[start : start + step]
        share = len(part) / rows
        loss = definition(leaves[0][start : start + step], *leaves[1:], part) * share
        torch.autograd.backward(loss, dys[0].double())
        total += loss.detach()
    return [total, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _one(draw: Draw, tensors: list[Tensor]) -> list[Tensor]:
    return [torch.ones((), device=draw.device)]


def _logits_and_target(draw: Draw, shape: Shape) -> list[Tensor]:
    return [draw.leaf(*shape), draw.classes(*shape)]


def _x_weight_and_target(draw: Draw, shape: Shape) -> list[Tensor]:
    rows, width, classes = shape
    # Logits of deviation 1.
    weight = draw.leaf(classes, width, scale=width**-0.5)
    return [draw.leaf(rows, width), weight, draw.classes(rows, classes)]


def _logits_read_and_gradient_written(shape: Shape) -> dict[str, int]:
    """The gradient needs the sums of the forward, so that its mode reads the logits again."""
    return {"forward": shape[0] * shape[1], "full": 3 * shape[0] * shape[1]}


def _three_products(shape: Shape) -> dict[str, int]:
    """The logits, the gradient of x and that of the weight."""
    return {"full": 6 * shape[0] * shape[1] * shape[2]}


def _summed_in_its_dtype(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Smaller chunks would take less in the forward alone: the peak is then the backward's, which
    holds the gradients as they were computed and as they are returned. On an H100, 8192 x 2048 x
    128256: 1067 MiB with chunks of 512 MiB and of 128, in 20.5 ms and 24.5."""
    return liger_ops.linear_cross_entropy(x, weight, target, accum_dtype=weight.dtype)


def _quack_linear(package: Any) -> Function:
    module = importlib.import_module(f"{package.__name__}.linear_cross_entropy")
    return lambda x, weight, target: module.chunked_linear_cross_entropy(x, weight, target)


ENTRIES = (
    Entry(
        op="cross_entropy",
        dims=("M", "V"),
        inputs=_logits_and_target,
        upstream=_one,
        ours=lambda logits, target: liger_ops.cross_entropy(logits, target),
        eager=model_loss,
        aten=lambda logits, target: F.cross_entropy(logits, target),
        peers={
            "liger-kernel": lambda liger: (
                lambda logits, target: liger.liger_cross_entropy(logits, target)
            ),
            "quack": lambda quack: lambda logits, target: quack.cross_entropy(logits, target),
        },
        work=_logits_read_and_gradient_written,
        figures=((8192, 32768), (8192, 128256)),
        models=models.of_vocabulary(),
        small=(256, 32768),
        truth=truth_by_rows,
    ),
    Entry(
        op="linear_cross_entropy",
        dims=("M", "D", "V"),
        inputs=_x_weight_and_target,
        upstream=_one,
        ours=lambda x, weight, target: liger_ops.linear_cross_entropy(x, weight, target),
        low_memory=_summed_in_its_dtype,
        eager=model_head_and_loss,
        peers={
            "liger-kernel": lambda liger: (
                lambda x, weight, target: liger.liger_fused_linear_cross_entropy(x, weight, target)
            ),
            "quack": _quack_linear,
        },
        work=_three_products,
        is_matrix_product=True,
        figures=((8192, 2048, 128256), (8192, 4096, 128256), (32768, 4096, 128256)),
        models=models.of_head(),
        small=(256, 512, 8192),
        truth=truth_by_rows,
    ),
)
