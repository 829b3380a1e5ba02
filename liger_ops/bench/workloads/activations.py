"""swiglu, geglu, clamped_swiglu, relu_squared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from . import models
from .entry import Draw, Entry, Shape, passes

ALPHA, LIMIT = 1.702, 7.0


def gpt_oss_activation(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up[..., ::2], gate_and_up[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * ALPHA)


def _gate_and_up(draw: Draw, shape: Shape) -> list[Tensor]:
    return [draw.leaf(*shape), draw.leaf(*shape)]


def _like_gate(draw: Draw, tensors: list[Tensor]) -> list[Tensor]:
    return draw.like(tensors[0])


def _gated_work(shape: Shape) -> dict[str, int]:
    return passes(3 * shape[0] * shape[1], 5 * shape[0] * shape[1])


ENTRIES = (
    Entry(
        op="swiglu",
        dims=("M", "N"),
        inputs=_gate_and_up,
        upstream=_like_gate,
        ours=lambda gate, up: liger_ops.swiglu(gate, up),
        eager=lambda gate, up: F.silu(gate) * up,
        peers={"liger-kernel": lambda liger: lambda gate, up: liger.liger_swiglu(gate, up)},
        work=_gated_work,
        figures=((16384, 14336),),
        models=models.of_activation("swiglu"),
        small=(1024, 4096),
    ),
    Entry(
        op="geglu",
        dims=("M", "N"),
        inputs=_gate_and_up,
        upstream=_like_gate,
        ours=lambda gate, up: liger_ops.geglu(gate, up),
        eager=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        peers={"liger-kernel": lambda liger: lambda gate, up: liger.liger_geglu(gate, up)},
        work=_gated_work,
        figures=((16384, 14336),),
        models=models.of_activation("geglu"),
        small=(1024, 4096),
    ),
    Entry(
        op="clamped_swiglu",
        dims=("M", "N"),
        inputs=lambda draw, shape: [draw.leaf(shape[0], 2 * shape[1])],
        upstream=lambda draw, tensors: [draw.normal(tensors[0].shape[0], tensors[0].shape[1] // 2)],
        ours=lambda gate_and_up: liger_ops.clamped_swiglu(
            gate_and_up, None, ALPHA, LIMIT, 1.0, True
        ),
        eager=gpt_oss_activation,
        work=_gated_work,
        models=models.of_activation("clamped_swiglu"),
        small=(1024, 2880),
    ),
    Entry(
        op="relu_squared",
        dims=("M", "N"),
        inputs=lambda draw, shape: [draw.leaf(*shape)],
        upstream=_like_gate,
        ours=lambda x: liger_ops.relu_squared(x),
        eager=lambda x: F.relu(x).square(),
        peers={"liger-kernel": lambda liger: lambda x: liger.liger_relu_squared(x)},
        work=lambda shape: passes(2 * shape[0] * shape[1], 3 * shape[0] * shape[1]),
        models=models.of_activation("relu_squared"),
        small=(1024, 4096),
    ),
)
