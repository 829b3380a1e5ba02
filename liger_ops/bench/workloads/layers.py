"""embedding, attn_res, lora_linear and tiled_mlp."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import MODELS, TOKENS, Draw, Entry, Shape, moved, peer, wide

EPS = 1e-6
RANK, SCALE = 16, 2.0


def model_attn_res(x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Compute attn_res as in the paper, in float32 between the norm's roundings."""
    values = wide(x)
    normalised = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPS)
    keys = wide(normalised.to(x.dtype) * weight)
    alpha = (keys * query.to(keys.dtype)).sum(-1, keepdim=True).softmax(0)
    return (alpha * values).sum(0).to(x.dtype)


def _mlp(draw: Draw, shape: Shape) -> list[Tensor]:
    M, D, width = shape
    sizes = ((width, D), (width, D), (D, width))
    return [draw.leaf(M, D), *(draw.leaf(*size, scale=size[1] ** -0.5) for size in sizes)]


def _adapted(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw x, a frozen weight, and a LoRA."""
    M, D, N = shape
    weight = draw.normal(N, D) * D**-0.5
    a, b = (draw.leaf(*size, scale=size[1] ** -0.5) for size in ((RANK, D), (N, RANK)))
    return [draw.leaf(M, D), weight, a, b]


def _moved_blocks(shape: Shape) -> dict[str, int]:
    """Return the least number of elements to move: the forward reads x and writes one block; the
    backward reads x and dy and writes dx."""
    N, M, D = shape
    return moved((N + 1) * M * D, (2 * N + 1) * M * D)


def _moved_rows(shape: Shape) -> dict[str, int]:
    """Return the least number of elements to move: the forward reads and writes the rows; the
    backward reads dy and writes the whole table."""
    M, V, D = shape
    return moved(2 * M * D, (M + V) * D)


def peft_linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + F.linear(F.linear(x, a), b) * SCALE


ENTRIES = (
    Entry(
        op="embedding",
        aten=lambda weight, indices: F.embedding(indices, weight),
        peers={
            "liger-kernel": lambda _: resolve_name(
                "liger_kernel.ops.experimental.embedding:LigerEmbeddingFunction.apply"
            )
        },
        dims=("M", "V", "D"),
        inputs=lambda draw, shape: [draw.leaf(*shape[1:]), draw.classes(*shape[:2])],
        counts=_moved_rows,
        figures=((8192, 32768, 4096), (32768, 128256, 4096)),
        models={name: (TOKENS, model.vocabulary, model.hidden) for name, model in MODELS.items()},
        small=(256, 8192, 1024),
    ),
    Entry(
        op="attn_res",
        ours=lambda x, query, weight: liger_ops.attn_res(x, query, weight, EPS),
        eager=model_attn_res,
        peers={"liger-kernel": peer("liger_attn_res", eps=EPS)},
        dims=("N", "M", "D"),
        inputs=lambda draw, shape: [
            *(draw.leaf(*shape), draw.leaf(shape[-1], scale=0.02), draw.leaf(shape[-1]))
        ],
        counts=_moved_blocks,
        figures=((8, 8192, 4096), (16, 8192, 2048)),
        models={name: (8, TOKENS, model.hidden) for name, model in MODELS.items()},
        small=(4, 256, 1024),
    ),
    Entry(
        op="lora_linear",
        ours=lambda x, weight, a, b: liger_ops.lora_linear(x, weight, a, b, SCALE),
        eager=peft_linear,
        dims=("M", "D", "N"),
        inputs=_adapted,
        # One product forward and one backward; those of the LoRA are small beside them.
        passes={"full": 4},
        is_matrix_product=True,
        figures=((8192, 2048, 2048), (8192, 4096, 14336)),
        models={name: (TOKENS, model.hidden, model.hidden) for name, model in MODELS.items()},
        small=(256, 512, 1024),
    ),
    Entry(
        op="tiled_mlp",
        eager=lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        dims=("M", "D", "I"),
        inputs=_mlp,
        # Three products forward and six backward; computing gate and up again takes two more.
        passes={"full": 18},
        is_matrix_product=True,
        figures=((32768, 4096, 14336), (131072, 4096, 14336)),
        models={
            name: (TOKENS, model.hidden, model.intermediate)
            for name, model in MODELS.items()
            if model.activation == "swiglu"
        },
        small=(256, 512, 1024),
    ),
)
