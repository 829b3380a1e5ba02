"""embedding."""

from __future__ import annotations

import importlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import Draw, Entry, Function, Shape
from .models import MODELS, TOKENS


def torchs_embedding(weight: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def _liger_embedding(package: Any) -> Function:
    module = importlib.import_module("liger_kernel.ops.experimental.embedding")
    return module.LigerEmbeddingFunction.apply


def _words(draw: Draw, shape: Shape) -> list[Tensor]:
    M, V, D = shape
    return [draw.leaf(V, D), draw.classes(M, V)]


def _moved_rows(shape: Shape) -> dict[str, int]:
    """The forward reads and writes the rows; the backward reads dy and writes the whole table."""
    M, V, D = shape
    forward, backward = 2 * M * D, (M + V) * D
    return {"forward": forward, "backward": backward, "full": forward + backward}


ENTRIES = (
    Entry(
        op="embedding",
        ours=liger_ops.embedding,
        aten=torchs_embedding,
        peers={"liger-kernel": _liger_embedding},
        dims=("M", "V", "D"),
        inputs=_words,
        counts=_moved_rows,
        figures=((8192, 32768, 4096), (32768, 128256, 4096)),
        models={name: (TOKENS, model.vocabulary, model.hidden) for name, model in MODELS.items()},
        small=(256, 8192, 1024),
    ),
)
