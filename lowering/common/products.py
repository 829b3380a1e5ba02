"""PyTorch's matrix products, into memory that is given."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None, add: bool) -> Tensor:
    """a @ b, or out + a @ b, in out; its dtype may be float32 if a and b are narrower."""
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    if dtype is not a.dtype and a.is_cuda:
        # The product is added to out as it is written: no other (V, D) is in memory.
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, dtype, out=out)
    elif dtype is not a.dtype and a.dtype is torch.bfloat16:
        part = torch.mm(a, b)
        if add:
            out += part
        else:
            out.copy_(part)
    else:
        # Convert first: a product in float16 would overflow.
        a, b = a.to(dtype), b.to(dtype)
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    return out
