"""rope."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import liger_ops

from . import models
from .entry import Draw, Entry, Function, Shape, passes

THETA = 10000.0


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def llama_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin


def _inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    """q and k as attention sees the heads of a projection: transposed views."""
    batch, length, heads, kv_heads, width = shape
    q, k = (
        draw.normal(batch, length, count, width).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads)
    )
    frequencies = THETA ** -(torch.arange(0, width, 2, device=draw.device) / width)
    angles = torch.outer(torch.arange(length, device=draw.device), frequencies)
    angles = torch.cat((angles, angles), -1).unsqueeze(0)
    return [q, k, angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)]


def _work(shape: Shape) -> dict[str, int]:
    batch, length, heads, kv_heads, width = shape
    elements = batch * length * (heads + kv_heads) * width
    return passes(2 * elements, 2 * elements)


def _quack(package: Any) -> Function:
    rotary = importlib.import_module(f"{package.__name__}.rotary")

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        half = cos.shape[-1] // 2
        tables = (cos[0, :, :half], sin[0, :, :half])
        return tuple(
            rotary.apply_rotary_emb(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k)
        )

    return rope


ENTRIES = (
    Entry(
        op="rope",
        dims=("batch", "S", "heads", "heads of k", "D"),
        inputs=_inputs,
        upstream=lambda draw, tensors: draw.like(tensors[0], tensors[1]),
        ours=lambda q, k, cos, sin: liger_ops.rope(q, k, cos, sin),
        eager=llama_rope,
        peers={
            "liger-kernel": lambda liger: lambda q, k, cos, sin: liger.liger_rope(q, k, cos, sin),
            "quack": _quack,
        },
        work=_work,
        figures=((4, 4096, 32, 8, 128),),
        models=models.of_rope(),
        small=(1, 512, 32, 8, 64),
    ),
)
