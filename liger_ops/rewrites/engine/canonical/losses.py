"""Classification losses, and the operations that they are composed of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .call import Call, dimension, dimensions, spelled, value


@spelled(F.cross_entropy)
def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: Any = -100,
    reduce: Any = None, reduction: Any = "mean", label_smoothing: Any = 0.0,
) -> Call | None:  # fmt: skip
    if size_average is not None or reduce is not None:
        return None
    return Call("cross_entropy", (input, target, weight, ignore_index, reduction, label_smoothing))


@spelled(F.nll_loss)
def _nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: Any = -100, reduce: Any = None, reduction: Any = "mean",
) -> Call | None:  # fmt: skip
    if size_average is not None or reduce is not None:
        return None
    return Call("nll_loss", (input, target, weight, ignore_index, reduction))


@spelled(torch.logsumexp, torch.special.logsumexp, "logsumexp")
def _logsumexp(input: Any, dim: Any, keepdim: Any = False) -> Call:
    return Call("logsumexp", (input, dimensions(input, dim), bool(keepdim)))


@spelled(torch.gather, "gather")
def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: Any = False) -> Call | None:
    return None if sparse_grad else Call("gather", (input, dimension(input, dim), index))


spelled(torch.full_like)(lambda input, fill_value: Call("full_like", (input, fill_value)))
spelled(torch.scatter, "scatter", "scatter_")(
    lambda input, dim, index, src: Call("scatter", (input, dimension(input, dim), index, src))
)


@spelled(torch.take_along_dim, "take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: Any = None) -> Call:
    return Call("gather", (input, dimension(input, dim), indices))


@spelled(torch.sum, "sum")
def _sum(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Call:
    return Call("sum", (input, dimensions(input, dim), bool(keepdim), value(dtype)))
