"""swiglu, geglu, clamped_swiglu, relu_squared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import Entry, intermediate, leaves, moved

ALPHA, LIMIT = 1.702, 7.0


def gpt_oss_activation(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up[..., ::2], gate_and_up[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * ALPHA)


GATED: dict[str, Any] = {
    "inputs": leaves(2), "passes": moved(3, 5), "figures": ((16384, 14336),), "small": (1024, 4096),
}  # fmt: skip
ENTRIES = (
    Entry(
        op="swiglu",
        eager=lambda gate, up: F.silu(gate) * up,
        peers={"liger-kernel": "liger_swiglu"},
        models=intermediate("swiglu"),
        **GATED,
    ),
    Entry(
        op="geglu",
        eager=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        peers={"liger-kernel": "liger_geglu"},
        models=intermediate("geglu"),
        **GATED,
    ),
    Entry(
        op="clamped_swiglu",
        ours=lambda x: liger_ops.clamped_swiglu(x, None, ALPHA, LIMIT, 1.0, True),
        eager=gpt_oss_activation,
        inputs=lambda draw, shape: [draw.leaf(shape[0], 2 * shape[1])],
        passes=moved(3, 5),
        models=intermediate("clamped_swiglu"),
        small=(1024, 2880),
    ),
    Entry(
        op="relu_squared",
        eager=lambda x: F.relu(x).square(),
        peers={"liger-kernel": "liger_relu_squared"},
        models=intermediate("relu_squared"),
        small=(1024, 4096),
    ),
)
