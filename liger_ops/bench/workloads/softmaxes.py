"""softmax and log_softmax."""

from __future__ import annotations

import torch.nn.functional as F

import liger_ops

from .entry import Entry, leaves, moved
from .models import VOCABULARY

ENTRIES = (
    Entry(
        op="softmax",
        ours=liger_ops.softmax,
        aten=lambda x: F.softmax(x, -1),
        peers={"liger-kernel": "liger_softmax", "quack": "softmax"},
        inputs=leaves(1),
        passes=moved(2, 3),
        figures=((8192, 4096), (8192, 32768)),
        models=VOCABULARY,
        small=(2048, 4096),
    ),
    Entry(
        op="log_softmax",
        ours=liger_ops.log_softmax,
        aten=lambda x: F.log_softmax(x, -1),
        inputs=leaves(1),
        passes=moved(2, 3),
        models=VOCABULARY,
        small=(2048, 4096),
    ),
)
