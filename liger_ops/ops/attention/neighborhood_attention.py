"""Attention of every query to the keys in a window around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import FINITE
from ..heads.head import cast_for_products
from ..tensors import in_order_of, widened
from .windows import BORDERS, Slot, slots, windows


@library.compose
def neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int | list[int],
    dilation: int | list[int] = 1, is_causal: bool | list[bool] = False,
    border: str = "clipped", scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend from every query to the keys in a window around it, in one or two dimensions.

        y_i = sum_j softmax_j(scale * query_i . key_j) * value_j        for j in the window of i

    In a dimension of L positions with a window of k = kernel_size keys and a dilation of d, the
    query i attends only to positions j with j % d = i % d. Counted in steps of d, its window is:

    * border="clipped", as in Liger-Kernel: the positions from k // 2 before i to k // 2 behind i
      that exist. A query at the border has fewer than k keys. k is odd.
    * border="shifted", as in NATTEN: the k nearest positions. The window of a query at the border
      is moved inwards, and every query has k keys. With an even k the window has one key more
      before i than behind it. k * d is at most L.
    * is_causal, with either border: i and the k - 1 positions before it, as far as they exist.

    In two dimensions, the window is the product of one window for each; kernel_size, dilation and
    is_causal are then a value for both dimensions, or a list of two.

    Scores and the softmax are in float32; the products take their operands in the inputs' dtype and
    sum in float32, as flash attention does. The softmax is therefore rounded to that dtype before
    its product with value. On NVIDIA GPUs, products of float32 follow
    `torch.backends.cuda.matmul.fp32_precision`. The gradients of key and value are summed over the
    queries, and over the heads that share them, in an order that does not change between runs.

    Time and memory grow with L * k: no tensor of L * L elements is made. The kernels store y and
    lse, and nothing for each pair of query and key; the backward computes the softmax again from
    lse, and stores one float32 number for each query. The definition, which runs on a CPU and for
    float64, stores a score for each query and key of its window.

    A value that is inf or NaN may reach queries near those that attend to it.

    Under autocast query, key and value are cast as
    `torch.nn.functional.scaled_dot_product_attention` casts them.

    This op calls `neighborhood_attention_forward`, which returns lse too.

    Args:
        query: (B, H, *spatial, D), floating point, any strides; spatial is one length or two, and D
            is at most 256.
        key: (B, H', *spatial, D), of query's dtype. H' divides H: each head of key serves H / H'
            neighbouring heads of query.
        value: of key's shape and dtype.
        kernel_size: at least 1.
        dilation: at least 1.
        is_causal: whether a query attends to no later position.
        border: "clipped" or "shifted".
        scale: a finite number; None for 1 / sqrt(D).

    Returns:
        y: of query's shape, dtype and layout.

    Raises:
        TypeError: a tensor is not floating point, or the dtypes differ.
        ValueError: query does not have one or two spatial dimensions, or has a D of 0 or above 256;
            the shapes do not fit together, or H' does not divide H; kernel_size or dilation is
            below 1, or has another number of values than the dimensions; kernel_size is even with
            the clipped border, or kernel_size * dilation above L with the shifted one; border is
            unknown; scale is not finite; or the devices differ.

    Source: Hassani et al., "Neighborhood Attention Transformer", 2023; Hassani and Shi, "Dilated
    Neighborhood Attention Transformer", 2022.

    Example:
        >>> query, value = torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
        >>> liger_ops.neighborhood_attention(query, query, value, 3).flatten()
        tensor([0.5000, 1.0000, 2.0000, 2.5000])
        >>> liger_ops.neighborhood_attention(query, query, value, 3, border="shifted").flatten()
        tensor([1.0000, 1.0000, 2.0000, 2.0000])
    """
    query, key, value = cast_for_products(query, key, value)
    options = (dilation, is_causal, border, scale)
    return neighborhood_attention_forward(query, key, value, kernel_size, *options)[0]


@library.forward(
    "...",
    tags=torch.Tag.needs_exact_strides,
    returns="y lse",
    axes="query=b h # D, key=b h' # D: query, value=b h' # D: query -> "
    "y=b h # D, lse=b h #: float32+query",
    options={"border": BORDERS, "scale": FINITE},
)
def neighborhood_attention_forward(call: Any) -> tuple[Tensor, Tensor]:
    """Compute `neighborhood_attention`, and the logarithm of each softmax's denominator.

        lse_i = log(sum_j exp(scale * query_i . key_j))

    By lse, the results of attention over different keys can be merged. Both results are
    differentiable.

    Returns:
        y: the result of `neighborhood_attention`.
        lse: (B, H, L) or (B, H, Y, X), contiguous, float32; float64 for float64 inputs.

    Raises:
        TypeError, ValueError: as `neighborhood_attention`.

    Example:
        >>> query = torch.zeros(1, 1, 3, 1)
        >>> liger_ops.neighborhood_attention_forward(query, query, query, 3)[1]
        tensor([[[0.6931, 1.0986, 0.6931]]])
    """
    attention, query = _Attention(call), call.query
    p, lse = attention.softmax()
    y = in_order_of(attention.mixed(p).reshape(query.shape).to(query.dtype), query)
    return y, lse.reshape(query.shape[:-1])


@library.backward(
    "neighborhood_attention_forward",
    "dy dlse query key value y lse ... output_mask -> dquery dkey dvalue",
)
def neighborhood_attention_backward(call: Any) -> Any:
    """Compute the gradient of `neighborhood_attention_forward`. For i and j in its window:

        p_ij    = exp(scale * query_i . key_j - lse_i)
        ds_ij   = p_ij * (dy_i . value_j - dy_i . y_i + dlse_i)
        dquery_i = scale * sum_j ds_ij * key_j
        dkey_j   = scale * sum_i ds_ij * query_i
        dvalue_j = sum_i p_ij * dy_i

    Kernels use the forward's y and lse. The definition computes them again, so that it can be
    differentiated. It is not derived by autograd, which would save a key and a value for each slot
    of the window.
    """
    attention, (wants_query, *wants_others) = _Attention(call), call.output_mask
    p, lse = attention.softmax()
    dy = attention.of_queries(call.dy)
    delta = (dy * attention.mixed(p)).sum(-1) - call.dlse.to(p.dtype).reshape(lse.shape)
    gradients: list[Tensor | None] = [None, None, None]
    if wants_query:
        dquery = torch.zeros_like(attention.query)
        for (index, inside), weight in zip(attention.slots(), p.unbind(-1), strict=True):
            dp = (dy * attention.value.index_select(-2, index)).sum(-1)
            ds = torch.where(inside, weight * (dp - delta), 0.0)
            dquery = dquery + ds.unsqueeze(-1) * attention.key.index_select(-2, index)
        gradients[0] = dquery * attention.scale
    if any(wants_others):
        dkey, dvalue = torch.zeros_like(attention.key), torch.zeros_like(attention.value)
        for index, inside in attention.slots(of_keys=True):
            query_i, dy_i = attention.query.index_select(-2, index), dy.index_select(-2, index)
            score = (query_i * attention.key).sum(-1) * attention.scale
            score = torch.where(inside, score - lse.index_select(-1, index), -float("inf"))
            weight = score.exp()
            dp = (dy_i * attention.value).sum(-1)
            ds = torch.where(inside, weight * (dp - delta.index_select(-1, index)), 0.0)
            # The heads of query that share a head of key are dimension 2.
            dkey = dkey + (ds.unsqueeze(-1) * query_i).sum(2, keepdim=True)
            dvalue = dvalue + (weight.unsqueeze(-1) * dy_i).sum(2, keepdim=True)
        gradients[1:] = [dkey * attention.scale, dvalue]
    return tuple(
        in_order_of(gradient.reshape(x.shape).to(x.dtype), x)
        if wanted and gradient is not None
        else None
        for wanted, gradient, x in zip(
            call.output_mask, gradients, (call.query, call.key, call.value), strict=True
        )
    )


class _Attention:
    """The tensors of the definition, and their windows.

    query is (B, key's heads, sharing heads, positions, D), where the sharing heads are the heads of
    query that share a head of key. key and value have 1 in that dimension.
    """

    def __init__(self, call: Any) -> None:
        tensors = (call.query, call.key, call.value)
        self.heads, self.lengths = call.key.shape[1], call.query.shape[2:-1]
        self.scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        options = (call.kernel_size, call.dilation, call.is_causal, call.border)
        self.windows = windows(*options, len(self.lengths))
        self.dtype = widened(call.query).dtype
        self.query, self.key, self.value = map(self.of_queries, tensors)

    def of_queries(self, x: Tensor) -> Tensor:
        """Reshape x, a tensor of query's or key's heads, as query is, and widen it."""
        return x.unflatten(1, (self.heads, -1)).flatten(3, -2).to(self.dtype)

    def slots(self, of_keys: bool = False) -> Iterator[Slot]:
        return slots(self.windows, self.lengths, self.query.device, of_keys)

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Return the softmax of every query's scores, and its lse.

        The last dimension of the softmax has an element for each slot of the window.
        """
        scores = torch.stack(
            [
                torch.where(
                    inside,
                    (self.query * self.key.index_select(-2, index)).sum(-1) * self.scale,
                    -float("inf"),
                )
                for index, inside in self.slots()
            ],
            -1,
        )
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp(), lse

    def mixed(self, p: Tensor) -> Tensor:
        """Return the sum of the values of every query's window, weighted by p."""
        y = torch.zeros_like(self.query)
        for (index, inside), weight in zip(self.slots(), p.unbind(-1), strict=True):
            value = self.value.index_select(-2, index)
            y = y + weight.unsqueeze(-1) * torch.where(inside.unsqueeze(-1), value, 0.0)
        return y


def _flops(call: Any, products: int) -> int:
    """Count the operations of `products` products of each query with each key of its window.

    A clipped window counts as a full one, as a masked key does in PyTorch's counter of attention.
    """
    options = (call.kernel_size, call.dilation, call.is_causal, call.border)
    keys = math.prod(window.size for window in windows(*options, call.query.dim() - 3))
    return 2 * call.query.numel() * keys * products


library.OPS["neighborhood_attention_forward"].flops = lambda call: _flops(call, 2)
# Two products for the scores and for the gradient of the softmax, and one for each gradient.
library.OPS["neighborhood_attention_backward"].flops = lambda call: _flops(
    call, 2 + sum(call.output_mask)
)
library.keep_dtypes_under_autocast(
    "neighborhood_attention_forward", "neighborhood_attention_backward"
)
