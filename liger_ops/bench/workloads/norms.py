"""rms_norm, fused_add_rms_norm, layer_norm, group_norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from . import models
from .entry import Draw, Entry, Function, Shape, passes, wide

EPS = 1e-6
GROUPS = 32


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    xhat = wide(x)
    xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * xhat.to(x.dtype)


def llama_add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return llama_norm(s, weight), s


def _rows(n_rows: int, n_parameters: int) -> Any:
    """n_rows tensors (M, N), then n_parameters of (N,)."""

    def inputs(draw: Draw, shape: Shape) -> list[Tensor]:
        tensors = [draw.leaf(*shape) for _ in range(n_rows)]
        return tensors + [draw.leaf(shape[1]) for _ in range(n_parameters)]

    return inputs


def _liger_rms_norm(liger: Any) -> Function:
    # Not in place: its default writes dx over dy, which the other providers are given too.
    return lambda x, weight: liger.liger_rms_norm(x, weight, EPS, 0.0, "llama", False)


def _liger_add_rms_norm(liger: Any) -> Function:
    return lambda x, residual, weight: liger.liger_fused_add_rms_norm(
        x, residual, weight, EPS, 0.0, "llama", False
    )


def _liger_group_norm(liger: Any) -> Function:
    return lambda x, weight, bias: liger.liger_group_norm(x, weight, bias, x.shape[1], GROUPS, 1e-5)


ENTRIES = (
    Entry(
        op="rms_norm",
        dims=("M", "N"),
        inputs=_rows(1, 1),
        upstream=lambda draw, tensors: draw.like(tensors[0]),
        ours=lambda x, weight: liger_ops.rms_norm(x, weight, EPS),
        eager=llama_norm,
        aten=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        peers={
            "liger-kernel": _liger_rms_norm,
            "quack": lambda quack: lambda x, weight: quack.rmsnorm(x, weight, eps=EPS),
        },
        work=lambda shape: passes(2 * shape[0] * shape[1], 3 * shape[0] * shape[1]),
        figures=(
            (32768, 1024),
            (32768, 4096),
            (16384, 8192),
            (8192, 16384),
            (4096, 32768),
            (2048, 65536),
        ),
        models=models.of_hidden(),
        small=(2048, 4096),
    ),
    Entry(
        op="fused_add_rms_norm",
        dims=("M", "N"),
        inputs=_rows(2, 1),
        upstream=lambda draw, tensors: draw.like(tensors[0], tensors[0]),
        ours=lambda x, residual, weight: liger_ops.fused_add_rms_norm(x, residual, weight, EPS),
        eager=llama_add_and_norm,
        peers={
            "liger-kernel": _liger_add_rms_norm,
            "quack": lambda quack: (
                lambda x, residual, weight: quack.rmsnorm(
                    x, weight, residual=residual, eps=EPS, prenorm=True
                )
            ),
        },
        work=lambda shape: passes(4 * shape[0] * shape[1], 4 * shape[0] * shape[1]),
        figures=((32768, 4096), (8192, 16384)),
        models=models.of_hidden(),
        small=(2048, 4096),
    ),
    Entry(
        op="layer_norm",
        dims=("M", "N"),
        inputs=_rows(1, 2),
        upstream=lambda draw, tensors: draw.like(tensors[0]),
        ours=lambda x, weight, bias: liger_ops.layer_norm(x, weight, bias, 1e-5),
        aten=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-5),
        peers={
            "liger-kernel": lambda liger: (
                lambda x, weight, bias: liger.liger_layer_norm(x, weight, bias, 1e-5)
            )
        },
        work=lambda shape: passes(2 * shape[0] * shape[1], 3 * shape[0] * shape[1]),
        figures=((32768, 4096), (8192, 16384)),
        models=models.of_hidden(),
        small=(2048, 4096),
    ),
    Entry(
        op="group_norm",
        dims=("batch", "C", "H", "W"),
        inputs=_rows(1, 2),
        upstream=lambda draw, tensors: draw.like(tensors[0]),
        ours=lambda x, weight, bias: liger_ops.group_norm(x, GROUPS, weight, bias, 1e-5),
        aten=lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias, 1e-5),
        peers={"liger-kernel": _liger_group_norm},
        work=lambda shape: passes(2 * _product(shape), 3 * _product(shape)),
        figures=((64, 512, 64, 64), (16, 1280, 32, 32)),
        # The widths of the U-Net, at 1024 x 1024 pixels.
        models={
            "sdxl-1": (4, 320, 128, 128),
            "sdxl-2": (4, 640, 64, 64),
            "sdxl-3": (4, 1280, 32, 32),
        },
        small=(2, 320, 32, 32),
    ),
)


def _product(shape: Shape) -> int:
    batch, channels, height, width = shape
    return batch * channels * height * width
