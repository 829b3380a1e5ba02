"""softmax, log_softmax and sparsemax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .entry import VOCABULARY, Entry


def model_sparsemax(x: Tensor) -> Tensor:
    ordered = (x - x.amax(-1, keepdim=True)).sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    sizes = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    count = (sizes * ordered > sums).sum(-1, keepdim=True)
    tau = sums.gather(-1, count - 1) / count
    return torch.relu(x - x.amax(-1, keepdim=True) - tau)


ENTRIES = (
    Entry(
        op="softmax",
        aten=lambda x: F.softmax(x, -1),
        peers={"liger-kernel": "liger_softmax", "quack": "softmax"},
        figures=((8192, 4096), (8192, 32768)),
        models=VOCABULARY,
    ),
    Entry(op="log_softmax", aten=lambda x: F.log_softmax(x, -1), models=VOCABULARY),
    Entry(
        op="sparsemax",
        eager=model_sparsemax,
        peers={"liger-kernel": "liger_sparsemax"},
        figures=((8192, 4096), (8192, 32768)),
        models=VOCABULARY,
    ),
)
