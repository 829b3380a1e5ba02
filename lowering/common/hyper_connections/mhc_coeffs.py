"""mhc_coeffs on a device: PyTorch's products, and the device's kernels before and after them.

The products are x @ phi, and the gradients of both. x: (M, K), phi: (K, N). Each is PyTorch's
matrix product in float32. x is far larger than the other tensors: it is converted to float32 a
chunk of rows at a time. In bfloat16 on a GPU it is not converted at all; the other factor is
instead split into bfloat16 tensors that add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import library
from ..definition import fill_by_definition
from ..tensors import next_power_of_2

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


@dataclass(frozen=True)
class CoefficientsProblem:
    """A call's inputs as the kernels take them: x as (M, K), contiguous tensors, and scalars."""

    x: Tensor
    hc: int
    phi: Tensor
    b: Tensor
    alphas: tuple[Tensor, Tensor, Tensor]
    tmax: int
    sinkhorn_eps: float
    post_mult: float

    @classmethod
    def of(cls, call: Any) -> CoefficientsProblem:
        hc, C = call.x.shape[-2:]
        return cls(
            call.x.reshape(-1, hc * C).contiguous(), hc, call.phi, call.b.contiguous(),
            (call.alpha_pre, call.alpha_post, call.alpha_res),
            call.tmax, call.sinkhorn_eps, call.post_mult,
        )  # fmt: skip

    @property
    def columns(self) -> int:
        """The columns of phi: hc for h_pre, hc for h_post and hc x hc for h_res."""
        return self.hc * (self.hc + 2)

    @property
    def H(self) -> int:
        return next_power_of_2(self.hc)

    @property
    def segment(self) -> int:
        """The iterations between two matrices that the backward starts from: `sinkhorn_backward`
        takes fewest steps with the root of their number."""
        return max(1, math.isqrt(self.tmax - 1))

    def by_tokens(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor as (M, numbers of a token), contiguous."""
        M = self.x.shape[0]
        return (
            None if tensor is None else tensor.reshape(M, tensor.numel() // max(1, M)).contiguous()
        )


def register(device: str, kernels: Any, most_streams: int) -> None:
    """Register the op with the functions of the module `kernels`:

        plan(problem, backward)
        row_rstd(x, rms_eps, rstd, plan)
        coefficients(problem, product, rstd, pre_eps, h_pre, h_post, h_res, plan)
        gradients(problem, dh_pre, dh_post, dh_res, product, rstd, dproduct, of_norm, sums, plan)
        fill_dx(product, x, of_norm, dx)

    of_norm: (M,), the factor of x in the gradient of its norm. sums: (2 * columns,), of dlogits and
    of dlogits * mix over the tokens; None if not wanted. Above `most_streams` the definition runs.
    """

    @library.kernel("mhc_coeffs_forward", device, module=kernels.__name__)
    def mhc_coeffs_forward(call, h_pre, h_post, h_res, product, rstd, plan):
        problem = CoefficientsProblem.of(call)
        if problem.x.shape[0] == 0:
            return
        if problem.hc > most_streams:
            outputs = (h_pre, h_post, h_res, product, rstd)
            fill_by_definition("mhc_coeffs_forward", call, outputs)
            return
        plan = plan or kernels.plan(problem, False)
        # The results are contiguous: these are views.
        products = product.view(-1, problem.columns)
        project(problem.x, problem.phi, products)
        kernels.row_rstd(problem.x, call.rms_eps, rstd, plan)
        kernels.coefficients(
            problem, products, rstd.view(-1), call.pre_eps, h_pre, h_post, h_res, plan
        )

    @library.kernel("mhc_coeffs_backward", device, module=kernels.__name__)
    def mhc_coeffs_backward(call, dx, dphi, db, dalpha_pre, dalpha_post, dalpha_res, plan):
        problem = CoefficientsProblem.of(call)
        x, dalphas = problem.x, (dalpha_pre, dalpha_post, dalpha_res)
        if problem.hc > most_streams:
            fill_by_definition("mhc_coeffs_backward", call, (dx, dphi, db, *dalphas))
            return
        if x.shape[0] == 0:
            for gradient in (dphi, db, *dalphas):
                if gradient is not None:
                    gradient.zero_()
            return
        plan = plan or kernels.plan(problem, True)
        grads = [problem.by_tokens(grad) for grad in (call.dh_pre, call.dh_post, call.dh_res)]
        product, rstd = problem.by_tokens(call.product), call.rstd.reshape(-1).contiguous()
        dproduct, of_norm = torch.empty_like(product), torch.empty_like(rstd)
        sums = None
        if db is not None or any(dalpha is not None for dalpha in dalphas):
            sums = product.new_empty(2 * problem.columns)
        kernels.gradients(problem, *grads, product, rstd, dproduct, of_norm, sums, plan)
        if dx is not None:
            x_gradient(x, problem.phi, dproduct, of_norm, dx.view(x.shape), kernels.fill_dx)
        if dphi is not None:
            phi_gradient(x, dproduct, dphi)
        if sums is not None:
            of_b, of_alpha = sums.split(problem.columns)
            if db is not None:
                db.copy_(of_b)
            terms = of_alpha.split([problem.hc, problem.hc, problem.hc * problem.hc])
            for dalpha, columns in zip(dalphas, terms, strict=True):
                if dalpha is not None:
                    dalpha.copy_(columns.sum())
