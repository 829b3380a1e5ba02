"""A stand-in for npu_grouped_matmul where torch_npu is not installed. It checks the arguments by
the documentation of torch_npu for Atlas A2 and A3, and computes in float32 on the CPU.

The documentation is Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/
torch_npu-npu_grouped_matmul.md, for products that are not quantised, with `group_list` a tensor and
one tensor of x, weight and y.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from simulated_npu import to_cpu, to_npu

SCHEMA = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor?"
    " group_list=None, int? split_item=0, int? group_type=None, int? group_list_type=0) -> Tensor[]"
)
BIAS = {
    torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32
}  # fmt: skip
MOST_GROUPS, INNER_LIMIT = 1024, 65536


def allocated(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_list: Tensor | None,
    split_item: int, group_type: int | None, group_list_type: int,
) -> Tensor:  # fmt: skip
    """Check the arguments without their values, and allocate the result."""
    (a,), (b,) = x, weight
    assert split_item in (2, 3) and group_list_type in (0, 1)
    assert group_list is not None and group_list.dtype is torch.int64 and group_list.dim() == 1
    groups = len(group_list)
    assert 0 < groups <= MOST_GROUPS and group_list.is_contiguous()
    assert a.dtype is b.dtype and a.dtype in BIAS and a.dim() == 2
    assert a.numel() and b.numel(), "empty tensors"
    assert max(a.shape[-1] if group_type == 0 else a.shape[0], *b.stride()[-2:]) < INNER_LIMIT
    if group_type == 2:
        assert a.t().is_contiguous(), "x must be transposed"
        assert b.dim() == 2 and b.is_contiguous(), "weight must not be transposed"
        assert bias is None and a.shape[1] == b.shape[0]
        return a.new_empty(groups, a.shape[0], b.shape[1])
    assert group_type == 0 and a.is_contiguous(), "x must not be transposed"
    assert b.dim() == 3 and b.shape[:2] == (groups, a.shape[1])
    assert b.is_contiguous() or b.mT.is_contiguous(), "weight may be transposed"
    for tensor in bias or ():
        assert tensor.dtype is BIAS[a.dtype] and tensor.shape == (groups, b.shape[2])
        assert tensor.is_contiguous()
    return a.new_empty(len(a), b.shape[2])


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, bias: list[Tensor] | None = None,
    group_list: Tensor | None = None, split_item: int = 0, group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Compute the product of each group in float32."""
    y = allocated(x, weight, bias, group_list, split_item, group_type, group_list_type)
    if group_list.is_meta:
        return [y]
    ends = group_list.cumsum(0) if group_list_type else group_list
    ends = [0, *ends.tolist()]
    (a,), (b,) = x, weight
    assert ends == sorted(ends) and ends[-1] <= a.shape[0 if group_type == 0 else 1]
    for e, (start, end) in enumerate(pairwise(ends)):
        if group_type == 2:
            y[e] = a[:, start:end].float() @ b[start:end].float()
        else:
            product = a[start:end].float() @ b[e].float()
            y[start:end] = product if bias is None else product + bias[0][e]
    return [y]


def on_simulated_npu(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Compute the same on the simulated device, which has no transposed tensors."""
    (x, weight), options = pytree.tree_map(to_cpu, (args, kwargs))
    if options["group_type"] == 2:
        x = [x[0].t().contiguous().t()]
    return [to_npu(y) for y in grouped_matmul(x, weight, **options)]


if not hasattr(torch.ops.npu, "npu_grouped_matmul"):
    library = torch.library.Library("npu", "FRAGMENT")
    library.define(SCHEMA)
    for key in ("CPU", "Meta"):
        library.impl("npu_grouped_matmul", grouped_matmul, key)
    library.impl("npu_grouped_matmul", on_simulated_npu, "PrivateUse1")
