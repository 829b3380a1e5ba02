"""Matrix products of groups of rows, by torch_npu's npu_grouped_matmul.

The groups are given by the index behind the last row of each, int64, for at most 1024 groups. There
may be rows behind the last group: their results in `product_of_rows` are undefined, and
`product_over_rows` leaves them out. A group without rows has the result 0 there. torch_npu
documents rows behind the last group for its newest devices alone; the kernels of all devices allow
them (gmm/grouped_matmul of cann/ops-transformer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product_of_rows(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight[e] + bias[e] of each group e: (n, K), (E, K, N), (E, N) -> (n, N)."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()
    if bias is not None and bias.dtype is not torch.float16:
        # The op takes a float16 bias with float16, and a float32 bias with bfloat16.
        bias = bias.float()
    return _grouped_matmul(x, weight, ends, group_type=0, bias=bias)


def product_over_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a.T @ b over the rows of each group: (n, P), (n, Q) -> (E, P, Q)."""
    return _grouped_matmul(a.t(), b, ends, group_type=2)


def _grouped_matmul(
    x: Tensor, weight: Tensor, ends: Tensor, group_type: int, bias: Tensor | None = None
) -> Tensor:
    # group_type: 0 for groups of x's rows, 2 for groups of the summed dimension.
    # split_item=3: the result is one tensor. group_list_type=0: groups are given by their ends.
    options: dict[str, Any] = {} if bias is None else {"bias": [bias.contiguous()]}
    results = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], **options, group_list=ends, group_type=group_type, group_list_type=0,
        split_item=3,
    )  # fmt: skip
    product: Tensor = results[0]
    return product
