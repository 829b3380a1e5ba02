"""The products of groups of rows, by torch_npu's npu_grouped_matmul.

Groups are given by their ends, int64, of which there may be 1024. Rows behind the last end have any
result in a product of rows, and are left out of a product over rows, in which a group without rows
has the result 0. torch_npu documents that there may be such rows for its newest devices alone; the
kernels of all devices do all of this (gmm/grouped_matmul of cann/ops-transformer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product_of_rows(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight[e] + bias[e] for the rows of each group e: (n, K), (E, K, N), (E, N) -> (n, N)."""
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.contiguous()
    if bias is not None and bias.dtype is not torch.float16:
        # float16 has a bias of its own dtype, and bfloat16 one of float32.
        bias = bias.float()
    return _grouped_matmul(x, weight, ends, group_type=0, bias=bias)


def product_over_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a.T @ b of the rows of each group: (n, P), (n, Q) -> (E, P, Q)."""
    return _grouped_matmul(a.t(), b, ends, group_type=2)


def _grouped_matmul(
    x: Tensor, weight: Tensor, ends: Tensor, group_type: int, bias: Tensor | None = None
) -> Tensor:
    # split_item=3: the result is one tensor. group_list_type=0: groups are given by their ends.
    given: dict[str, Any] = {} if bias is None else {"bias": [bias.contiguous()]}
    results = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], **given, group_list=ends, group_type=group_type, group_list_type=0,
        split_item=3,
    )  # fmt: skip
    product: Tensor = results[0]
    return product
