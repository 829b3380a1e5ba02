"""rms_norm, its fused, gated and modulated forms, layer_norm, group_norm, dyt and poly_norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import HIDDEN, TOKENS, Draw, Entry, Shape, leaves, moved, peer, wide

EPS = 1e-6
GROUPS = 32


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    xhat = wide(x)
    xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * xhat.to(x.dtype)


def llama_add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return llama_norm(s, weight), s


def modulated(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return y * (1 + scale[:, None]) + shift[:, None]


def _samples(weights: int) -> Callable[[Draw, Shape], list[Tensor]]:
    """Return the function that draws x of (batch, tokens, N), scale and shift of (batch, N), and
    `weights` vectors of N."""

    def inputs(draw: Draw, shape: Shape) -> list[Tensor]:
        batch, _, N = shape
        return [draw.leaf(*size) for size in (shape, (batch, N), (batch, N), *[(N,)] * weights)]

    return inputs


# The models are images or latent frames, in a batch that fills a GPU.
MODULATED: dict[str, Any] = {
    "dims": ("batch", "T", "N"),
    "figures": ((8, 4096, 1536), (4, 4608, 3072)),
    "models": {
        "dit-xl": (64, 256, 1152), "sd3-medium": (8, 4096, 1536),
        "flux-dev": (4, 4608, 3072), "wan-14b": (1, 32760, 5120),
    },
    "small": (2, 512, 3072),
}  # fmt: skip


def model_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * gamma + beta


def motif_poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    def norm(u: Tensor) -> Tensor:
        return u / torch.sqrt(u.pow(2).mean(-1, keepdim=True) + EPS)

    return weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias


ENTRIES = (
    Entry(
        op="rms_norm",
        ours=lambda x, weight: liger_ops.rms_norm(x, weight, EPS),
        eager=llama_norm,
        aten=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        peers={
            # Not in place: by default it writes dx over dy, which the other providers use too.
            "liger-kernel": peer("liger_rms_norm", EPS, 0.0, "llama", False),
            "quack": peer("rmsnorm", eps=EPS),
        },
        inputs=leaves(1, 1),
        figures=(
            *((32768, 1024), (32768, 4096), (16384, 8192)),
            *((8192, 16384), (4096, 32768), (2048, 65536)),
        ),
        models=HIDDEN,
    ),
    Entry(
        op="fused_add_rms_norm",
        ours=lambda x, residual, weight: liger_ops.fused_add_rms_norm(x, residual, weight, EPS),
        eager=llama_add_and_norm,
        peers={
            "liger-kernel": peer("liger_fused_add_rms_norm", EPS, 0.0, "llama", False),
            "quack": lambda quack: (
                lambda x, residual, weight: quack.rmsnorm(
                    x, weight, residual=residual, eps=EPS, prenorm=True
                )
            ),
        },
        inputs=leaves(2, 1),
        passes=moved(4, 4),
        figures=((32768, 4096), (8192, 16384)),
        models=HIDDEN,
    ),
    Entry(
        op="gated_rms_norm",
        ours=lambda x, gate, weight: liger_ops.gated_rms_norm(x, gate, weight, EPS),
        eager=lambda x, gate, weight: (llama_norm(x, weight) * F.silu(wide(gate))).to(x.dtype),
        inputs=leaves(2, 1),
        passes=moved(3, 5),
        # The heads of Qwen3-Next, and the widths of Mamba 2.
        figures=((TOKENS * 32, 128), (32768, 4096), (16384, 8192)),
        models={"qwen3-next-80b": (TOKENS * 32, 128), "mamba2-2.7b": (TOKENS, 5120)},
    ),
    Entry(
        op="modulated_rms_norm",
        ours=lambda x, scale, shift, weight: liger_ops.modulated_rms_norm(
            x, scale, shift, weight, EPS
        ),
        eager=lambda x, scale, shift, weight: modulated(llama_norm(x, weight), scale, shift),
        peers={
            "liger-kernel": peer(
                "liger_modulated_rms_norm", EPS, 0.0, "llama", False, order=(0, 3, 1, 2)
            )
        },
        inputs=_samples(1),
        **MODULATED,
    ),
    Entry(
        op="modulated_layer_norm",
        ours=lambda x, scale, shift: liger_ops.modulated_layer_norm(x, scale, shift, eps=EPS),
        eager=lambda x, scale, shift: modulated(
            F.layer_norm(x, x.shape[-1:], None, None, EPS), scale, shift
        ),
        inputs=_samples(0),
        **MODULATED,
    ),
    Entry(
        op="dyt",
        eager=model_dyt,
        peers={"liger-kernel": "liger_dyt"},
        inputs=lambda draw, shape: [draw.leaf(*n) for n in (shape, (1,), shape[1:], shape[1:])],
        figures=((32768, 4096), (8192, 16384)),
        # The widths of ViT-B and ViT-L, in which its authors use it, and of their LLaMA.
        models={"vit-b": (TOKENS, 768), "vit-l": (TOKENS, 1024), "llama-7b": (TOKENS, 4096)},
    ),
    Entry(
        op="poly_norm",
        eager=motif_poly_norm,
        # Not in place, as rms_norm.
        peers={"liger-kernel": peer("liger_poly_norm", EPS, False)},
        inputs=lambda draw, shape: [draw.leaf(*size) for size in (shape, (3,), (1,))],
        figures=((32768, 4096), (8192, 16384)),
        models={"motif-2.6b": (TOKENS, 8192)},
    ),
    Entry(
        op="layer_norm",
        ours=lambda x, weight, bias: liger_ops.layer_norm(x, weight, bias, 1e-5),
        aten=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-5),
        peers={"liger-kernel": peer("liger_layer_norm", 1e-5)},
        inputs=leaves(1, 2),
        figures=((32768, 4096), (8192, 16384)),
        models=HIDDEN,
    ),
    Entry(
        op="group_norm",
        ours=lambda x, weight, bias: liger_ops.group_norm(x, GROUPS, weight, bias, 1e-5),
        aten=lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias, 1e-5),
        peers={
            "liger-kernel": lambda liger: (
                lambda x, weight, bias: liger.liger_group_norm(
                    x, weight, bias, x.shape[1], GROUPS, 1e-5
                )
            )
        },
        dims=("batch", "C", "H", "W"),
        inputs=leaves(1, 2),
        figures=((64, 512, 64, 64), (16, 1280, 32, 32)),
        # The widths of SDXL's U-Net, at 1024 x 1024 pixels.
        models={
            "sdxl-1": (4, 320, 128, 128),
            "sdxl-2": (4, 640, 64, 64),
            "sdxl-3": (4, 1280, 32, 32),
        },
        small=(2, 320, 32, 32),
    ),
)
