"""PyTorch's matrix products, written into memory of the caller."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill out with x @ weight.T + bias."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None, add: bool) -> Tensor:
    """Write a @ b to `out`, or with `add` add it, and return `out`, which is allocated if it is
    None. `dtype` is the dtype of `out`, which may be float32 where a and b are narrower."""
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    if dtype is not a.dtype and a.is_cuda:
        # cuBLAS adds the product to out as it writes it: no second (V, D) is in memory.
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, dtype, out=out)
    elif dtype is not a.dtype and a.dtype is torch.bfloat16:
        # Each product is rounded to bfloat16, the sum of them is not.
        partial = torch.mm(a, b)
        if add:
            out += partial
        else:
            out.copy_(partial)
    else:
        # Convert first: a product in float16 would overflow.
        a, b = a.to(dtype), b.to(dtype)
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    return out
