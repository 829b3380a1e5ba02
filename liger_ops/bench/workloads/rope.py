"""rope, and rms_norm_rope."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .entry import ROPE, Draw, Entry, Function, Shape, moved
from .norms import llama_norm

THETA = 10000.0


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def llama_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin


def _inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw q and k as attention gets them from a projection, transposed views; and cos and sin."""
    batch, length, heads, kv_heads, width = shape
    q, k = (
        draw.normal(batch, length, count, width).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads)
    )
    frequencies = THETA ** -(torch.arange(0, width, 2, device=draw.device) / width)
    angles = torch.outer(torch.arange(length, device=draw.device), frequencies)
    angles = torch.cat((angles, angles), -1).unsqueeze(0)
    return [q, k, angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)]


def _elements(shape: Shape) -> int:
    batch, length, heads, kv_heads, width = shape
    return batch * length * (heads + kv_heads) * width


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
        eager=llama_rope,
        peers={"liger-kernel": "liger_rope", "quack": _quack},
        dims=("batch", "S", "heads", "heads of k", "D"),
        inputs=_inputs,
        passes=moved(2, 2),
        elements=_elements,
        figures=((4, 4096, 32, 8, 128),),
        models=ROPE,
        small=(1, 512, 32, 8, 64),
    ),
    Entry(
        op="rms_norm_rope",
        eager=lambda q, k, cos, sin, q_weight, k_weight: llama_rope(
            llama_norm(q, q_weight), llama_norm(k, k_weight), cos, sin
        ),
        dims=("batch", "S", "heads", "heads of k", "D"),
        inputs=lambda draw, shape: [
            *_inputs(draw, shape),
            draw.leaf(shape[-1]),
            draw.leaf(shape[-1]),
        ],
        passes=moved(2, 3),
        elements=_elements,
        figures=((1, 8192, 32, 8, 128), (1, 8192, 8, 4, 256)),
        models={name: ROPE[name] for name in ROPE if name.startswith(("qwen3", "gemma3"))},
        small=(1, 512, 32, 8, 64),
    ),
)
