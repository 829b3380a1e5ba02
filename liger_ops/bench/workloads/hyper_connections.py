"""mhc_coeffs, mhc_pre, mhc_post_res."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import TOKENS, Draw, Entry, Shape, moved, peer, wide

EPS = 1e-6
ITERATIONS = 20

# DeepSeek-V4-Flash and DeepSeek-V4-Pro. The passes below are for their 4 streams.
MODELS = {"deepseek-v4-flash": (TOKENS, 4, 4096), "deepseek-v4-pro": (TOKENS, 4, 7168)}


def deepseek_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hc = x.shape[-2]
    flat = wide(x).flatten(-2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    mix = F.linear(flat, phi.t().to(flat.dtype))
    pre, post, comb = mix.split([hc, hc, hc * hc], -1)
    b_pre, b_post, b_comb = b.split([hc, hc, hc * hc])
    comb = comb.unflatten(-1, (hc, hc)) * alpha_res + b_comb.view(hc, hc)
    comb = torch.softmax(comb, -1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return (
        torch.sigmoid(pre * alpha_pre + b_pre) + EPS,
        2 * torch.sigmoid(post * alpha_post + b_post),
        comb,
    )


def deepseek_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def deepseek_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    added = h_post.to(x.dtype).unsqueeze(-1) * f_out.unsqueeze(-2)
    return added + torch.matmul(h_res.to(x.dtype), x)


def _coeffs_inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw x and phi in the workload's dtype, and the small tensors in float32."""
    M, hc, C = shape
    columns = hc * hc + 2 * hc
    alphas = [torch.ones((), device=draw.device, requires_grad=True) for _ in range(3)]
    b = torch.zeros(columns, device=draw.device, requires_grad=True)
    return [draw.leaf(M, hc, C), draw.leaf(hc * C, columns, scale=0.02), b, *alphas]


def _coefficient(draw: Draw, *shape: int) -> Tensor:
    """Draw coefficients in float32, as mhc_coeffs returns them."""
    return torch.sigmoid(draw.normal(*shape).float()).requires_grad_()


def _post_res_inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    M, hc, C = shape
    h_post, h_res = _coefficient(draw, M, hc), _coefficient(draw, M, hc, hc)
    return [draw.leaf(*shape), draw.leaf(M, C), h_post, h_res]


COMMON: dict[str, Any] = {
    "dims": ("M", "hc", "C"), "elements": lambda shape: shape[0] * shape[2],
    "figures": tuple(MODELS.values()), "models": MODELS, "small": (512, 4, 1024),
}  # fmt: skip
ENTRIES = (
    Entry(
        op="mhc_coeffs",
        ours=lambda *tensors: liger_ops.mhc_coeffs(*(*tensors, ITERATIONS, EPS, EPS)),
        eager=deepseek_coeffs,
        peers={"liger-kernel": peer("liger_mhc_coeffs", allow_fp32=True, pre_eps=EPS)},
        inputs=_coeffs_inputs,
        # The 4 streams of x, and in the backward those of dx too.
        passes=moved(4, 8),
        **COMMON,
    ),
    Entry(
        op="mhc_pre",
        eager=deepseek_pre,
        peers={"liger-kernel": "liger_mhc_pre"},
        inputs=lambda draw, shape: [draw.leaf(*shape), _coefficient(draw, *shape[:2])],
        passes=moved(5, 9),
        **COMMON,
    ),
    Entry(
        op="mhc_post_res",
        eager=deepseek_post_res,
        peers={"liger-kernel": "liger_mhc_post_res"},
        inputs=_post_res_inputs,
        passes=moved(9, 14),
        **COMMON,
    ),
)
