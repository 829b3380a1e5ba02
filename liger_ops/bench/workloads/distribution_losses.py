"""kl_div, jsd and tvd: the losses of two distributions given as tensors."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .entry import Draw, Entry, Shape, moved, peer, wide
from .losses import OF_LOGITS, model_jsd


def _distributions(draw: Draw, shape: Shape, logarithms: tuple[bool, bool]) -> list[Tensor]:
    """Draw two distributions, or their logarithms. The second, the teacher's, is not trained."""
    distributions = []
    for logarithm in logarithms:
        x = wide(draw.normal(*shape)).log_softmax(-1)
        distributions.append((x if logarithm else x.exp()).to(draw.dtype))
    distributions[0].requires_grad_()
    return distributions


def _loss(op: str, liger: Any, logarithms: tuple[bool, bool], **more: Any) -> Entry:
    return Entry(
        op=op,
        peers={"liger-kernel": liger},
        inputs=lambda draw, shape: _distributions(draw, shape, logarithms),
        **{**OF_LOGITS, **more},
    )


# The default reduction of Liger-Kernel's functions is the mean.
ENTRIES = (
    # The backward of kl_div reads the target and writes input's gradient.
    _loss(
        "kl_div", peer("liger_kl_div", reduction="batchmean"), (True, False), passes=moved(2, 2),
        eager=lambda x, y: F.kl_div(wide(x), y.to(wide(x).dtype), reduction="batchmean"),
    ),
    _loss("jsd", "liger_jsd", (True, True), eager=model_jsd, passes=moved(2, 3)),
    _loss(
        "tvd", peer("liger_tvd", reduction="batchmean"), (False, False), passes=moved(2, 3),
        eager=lambda p, q: (wide(p) - q.to(wide(p).dtype)).abs().sum() / (2 * len(p)),
    ),
)  # fmt: skip
