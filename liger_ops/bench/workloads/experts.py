"""moe_experts."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor

from .entry import Draw, Entry, Shape, wide


def model_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts as transformers' `grouped_mm` does; with one matrix product for each expert
    if PyTorch has no grouped product for the tensors."""
    T, K = top_k_index.shape
    E = gate_up.shape[0]
    ids, order = top_k_index.flatten().sort()
    offsets = torch.searchsorted(ids, torch.arange(1, E + 1, device=ids.device), out_int32=True)
    grouped = x.is_cuda and x.dtype is torch.bfloat16

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        if grouped:
            return F.grouped_mm(rows, weight.mT, offs=offsets)
        # Without data, any ends have the same shapes.
        ends = [0] * (E - 1) + [T * K] if ids.is_meta else offsets.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return torch.cat([F.linear(r, w) for r, w in zip(rows.split(sizes), weight, strict=True)])

    gate, up = product(x[order // K], gate_up).chunk(2, -1)
    weighted = product(F.silu(gate) * up, down) * top_k_weights.flatten()[order].unsqueeze(-1)
    return wide(weighted[order.argsort()]).unflatten(0, (T, K)).sum(1).to(x.dtype)


def _inputs(draw: Draw, shape: Shape) -> list[Tensor]:
    T, K, E, D, I = shape
    scores = torch.rand(T, E, generator=draw.generator, device=draw.device)
    return [
        draw.leaf(T, D),
        draw.leaf(E, 2 * I, D, scale=D**-0.5),
        draw.leaf(E, D, I, scale=I**-0.5),
        scores.topk(K).indices,
        draw.normal(T, K).softmax(-1).requires_grad_(),
    ]


ENTRIES = (
    Entry(
        op="moe_experts",
        eager=model_experts,
        peers={
            "liger-kernel": lambda _: resolve_name(
                "liger_kernel.ops.fused_moe:LigerFusedMoEFunction.apply"
            )
        },
        dims=("T", "K", "E", "D", "I"),
        inputs=_inputs,
        # Three products forward, of which two are one, and six backward.
        passes={"full": 18},
        elements=lambda shape: shape[0] * shape[1] * shape[3] * shape[4],
        is_matrix_product=True,
        figures=((32768, 8, 128, 2048, 768), (8192, 8, 128, 2048, 768), (8192, 8, 64, 7168, 2048)),
        models={
            "qwen3-30b-a3b": (8192, 8, 128, 2048, 768),
            "gpt-oss-20b": (8192, 4, 32, 2880, 2880),
        },
        small=(256, 2, 8, 512, 256),
    ),
)
