"""router_losses: the load-balancing loss of all layers of a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

import liger_ops

from .entry import Entry, moved

TOP_K = 8


def model_load_balancing(*gate_logits: Tensor) -> Tensor:
    """Compute the load-balancing loss as models of transformers do."""
    experts = gate_logits[0].shape[-1]
    weights = torch.cat(gate_logits).softmax(-1)
    _, selected = torch.topk(weights, TOP_K, dim=-1)
    mask = torch.nn.functional.one_hot(selected, experts).to(weights.dtype)
    return (mask.mean(0) * weights.mean(0).unsqueeze(0)).sum() * experts


ENTRIES = (
    # The forward reads the logits, and the backward reads them and writes their gradient.
    Entry(
        op="router_losses",
        ours=lambda *gate_logits: liger_ops.router_losses(list(gate_logits), TOP_K)[0],
        eager=model_load_balancing,
        dims=("layers", "tokens", "experts"),
        inputs=lambda draw, shape: [draw.leaf(*shape[1:]) for _ in range(shape[0])],
        passes=moved(1, 2),
        figures=((48, 8192, 128), (48, 65536, 128)),
        models={"Qwen3-30B-A3B": (48, 65536, 128), "Mixtral-8x7B": (32, 65536, 8)},
        small=(8, 512, 128),
    ),
)
