"""Rows of a table by index, with a gradient that is summed in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import library
from ..record import looked_up
from .tensors import widened


@library.define(tags=torch.Tag.needs_fixed_stride_order, axes="weight=V d, indices=*: int -> y=* d")
def embedding(weight: Tensor, indices: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table, such as the vectors of words, by index.

        y[i] = weight[indices[i]]
        dweight[v] = sum of dy[i] over all i with indices[i] = v; 0 for v = padding_idx

    The result is that of `torch.nn.functional.embedding`, and is gathered by PyTorch. The gradient
    is dense. Each of its rows is summed in float32, in an order that does not change between runs,
    and rounded once; the rows of a word that occurs often are summed in parts, by several programs.
    The rows of dy at padding_idx are not read.

    The backward sorts the indices and keeps nothing else: indices is all that is saved. Beside
    dweight and what torch.sort needs it takes 16 bytes an index, and for rows of bfloat16 an eighth
    of dy's memory for the partial sums of words that occur often; half of dy's if there are fewer
    than 4096 indices.

    PyTorch reports an index outside the table: by IndexError on a CPU, by an assertion on a GPU.
    Under autocast the op runs in weight's dtype. float64 runs the definition on every device.

    Args:
        weight: (V, D), floating point, any strides.
        indices: (...), int32 or int64, from 0 to V - 1.
        padding_idx: an index whose row of dweight stays 0; negative ones count from the end. None
            for no such index.

    Returns:
        (..., D), contiguous, of weight's dtype.

    Raises:
        TypeError: weight is not floating point, or indices are not int32 or int64.
        ValueError: weight does not have two dimensions, padding_idx is outside the table, or the
            devices differ.
        IndexError: on a CPU, an index is not from 0 to V - 1.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> liger_ops.embedding(weight, torch.tensor([1, 0]))
        tensor([[3., 4.],
                [1., 2.]])
    """
    with looked_up("indices", f"from 0 to {weight.shape[0] - 1}"):
        y = F.embedding(indices, weight).contiguous()
    if padding_idx is not None:
        # PyTorch's own padding_idx leaves the tangent of these rows in forward-mode AD.
        padding = torch.eq(indices, row_of(padding_idx, weight.shape[0]))
        y = torch.where(padding.unsqueeze(-1), y.detach(), y)
    return y


@library.define(tags=torch.Tag.needs_fixed_stride_order)
def embedding_backward(
    dy: Tensor, indices: Tensor, num_embeddings: int | torch.SymInt, padding_idx: int | None
) -> Tensor:
    """Compute the gradient of `embedding`.

        dweight[v] = sum of dy[i] over all i with indices[i] = v; 0 for v = padding_idx

    Args:
        dy: (..., D), any strides.
        indices, padding_idx: as given to `embedding`.
        num_embeddings: the number V of the table's rows.

    Returns:
        dweight: (V, D), contiguous, of dy's dtype.

    Raises:
        TypeError, ValueError: as `embedding`; or dy does not have the shape of indices and one
            dimension more.
    """
    padding = -1 if padding_idx is None else row_of(padding_idx, num_embeddings)
    # PyTorch's function adds each word's rows one after the other, in a fixed order.
    dweight = torch.ops.aten.embedding_dense_backward(
        widened(dy).contiguous(), indices, num_embeddings, padding, False
    )
    return dweight.to(dy.dtype)


def row_of(padding_idx: int, num_embeddings: int | torch.SymInt) -> Any:
    """Return padding_idx counted from 0: an int or, while tracing, a SymInt."""
    return padding_idx + num_embeddings if padding_idx < 0 else padding_idx


def _setup_context(ctx: Any, call: Any, output: Tensor) -> None:
    ctx.save_for_backward(call.indices)
    ctx.options = (call.weight.shape[0], call.padding_idx)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    return (embedding_backward(dy, indices, *ctx.options),)


library.gradient("embedding", _backward, _setup_context)
