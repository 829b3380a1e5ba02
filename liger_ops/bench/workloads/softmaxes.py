"""softmax and log_softmax."""

from __future__ import annotations

import torch.nn.functional as F

import liger_ops

from .entry import Entry
from .models import VOCABULARY

ENTRIES = (
    Entry(
        op="softmax",
        ours=liger_ops.softmax,
        aten=lambda x: F.softmax(x, -1),
        peers={"liger-kernel": "liger_softmax", "quack": "softmax"},
        figures=((8192, 4096), (8192, 32768)),
        models=VOCABULARY,
    ),
    Entry(
        op="log_softmax",
        ours=liger_ops.log_softmax,
        aten=lambda x: F.log_softmax(x, -1),
        models=VOCABULARY,
    ),
)
