"""softmax and log_softmax."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import liger_ops

from . import models
from .entry import Draw, Entry, Shape, passes


def _x(draw: Draw, shape: Shape) -> list[Tensor]:
    return [draw.leaf(*shape)]


def _like_x(draw: Draw, tensors: list[Tensor]) -> list[Tensor]:
    return draw.like(tensors[0])


def _work(shape: Shape) -> dict[str, int]:
    return passes(2 * shape[0] * shape[1], 3 * shape[0] * shape[1])


ENTRIES = (
    Entry(
        op="softmax",
        dims=("M", "N"),
        inputs=_x,
        upstream=_like_x,
        ours=lambda x: liger_ops.softmax(x),
        aten=lambda x: F.softmax(x, -1),
        peers={
            "liger-kernel": lambda liger: lambda x: liger.liger_softmax(x),
            "quack": lambda quack: lambda x: quack.softmax(x),
        },
        work=_work,
        figures=((8192, 4096), (8192, 32768)),
        models=models.of_vocabulary(),
        small=(2048, 4096),
    ),
    Entry(
        op="log_softmax",
        dims=("M", "N"),
        inputs=_x,
        upstream=_like_x,
        ours=lambda x: liger_ops.log_softmax(x),
        aten=lambda x: F.log_softmax(x, -1),
        work=_work,
        models=models.of_vocabulary(),
        small=(2048, 4096),
    ),
)
