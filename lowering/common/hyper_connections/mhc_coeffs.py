"""mhc_coeffs on a device: PyTorch's products, and the device's kernels before and after them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import library
from ..definition import fill_by_definition
from ..sizes import next_power_of_2
from .mhc_products import phi_gradient, project, x_gradient


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
