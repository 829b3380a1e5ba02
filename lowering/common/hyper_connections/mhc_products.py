"""The matrix products of mhc_coeffs: x @ phi, and the gradients of both. x: (M, K), phi: (K, N).

Each is PyTorch's matrix product in float32. x is far larger than the other tensors: it is converted
to float32 a chunk of rows at a time. In bfloat16 on a GPU it is not converted at all; the other
factor is instead split into bfloat16 tensors that add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Bytes of a chunk in float32: it stays in the L2 cache of an H100 between the conversion and the
# product.
CHUNK_BYTES = 32 * 2**20

# Writes a chunk of dx: (dproduct @ phi.T, x, of_norm, dx) -> dx = the product - x * of_norm.
FillDx = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def row_chunks(x: Tensor) -> Iterator[slice]:
    """Yield chunks of rows of x, of CHUNK_BYTES in float32."""
    M, K = x.shape
    rows = max(1, CHUNK_BYTES // (4 * K))
    for start in range(0, M, rows):
        yield slice(start, min(start + rows, M))


def bfloat16_parts(wide: Tensor) -> Tensor:
    """Split (rows, N) into three tensors of bfloat16, side by side, that add up to it: three times
    8 bits hold the 24 bits of a float32. A tensor of bfloat16 is returned as it is."""
    if wide.dtype is torch.bfloat16:
        return wide
    rest, parts = wide.float(), []
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.cat(parts, 1)


def summed_parts(product: Tensor, N: int) -> Tensor:
    """Add up the columns of a product with bfloat16_parts to those of the product with the tensor
    of N columns itself."""
    return product if product.shape[1] == N else product.view(-1, product.shape[1] // N, N).sum(1)


def _without_a_copy(x: Tensor) -> bool:
    """Return whether PyTorch has a product of x in its own dtype that returns float32."""
    return x.is_cuda and x.dtype is torch.bfloat16


def project(x: Tensor, phi: Tensor, product: Tensor) -> None:
    """Fill product with x @ phi, in float32."""
    if _without_a_copy(x):
        wide = torch.ops.aten.mm.dtype(x, bfloat16_parts(phi), torch.float32)
        product.copy_(summed_parts(wide, phi.shape[1]))
        return
    phi = phi.float()
    for rows in [slice(None)] if x.dtype is torch.float32 else row_chunks(x):
        torch.mm(x[rows].float(), phi, out=product[rows])


def phi_gradient(x: Tensor, dproduct: Tensor, dphi: Tensor) -> None:
    """Fill dphi with x.T @ dproduct, summed in float32."""
    if _without_a_copy(x):
        wide = torch.ops.aten.mm.dtype(x.t(), bfloat16_parts(dproduct), torch.float32)
        dphi.copy_(summed_parts(wide, dphi.shape[1]))
    elif x.dtype is torch.float32:
        dphi.copy_(torch.mm(x.t(), dproduct))
    else:
        total = torch.zeros_like(dphi, dtype=torch.float32)
        for rows in row_chunks(x):
            total.addmm_(x[rows].float().t(), dproduct[rows])
        dphi.copy_(total)


def x_gradient(
    x: Tensor, phi: Tensor, dproduct: Tensor, of_norm: Tensor, dx: Tensor, fill: FillDx
) -> None:
    """Fill dx with dproduct @ phi.T - x * of_norm, rounded once."""
    transposed = phi.float().t()
    for rows in row_chunks(x):
        fill(torch.mm(dproduct[rows], transposed), x[rows], of_norm[rows], dx[rows])
