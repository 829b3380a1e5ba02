"""kl_div, jsd and tvd: the losses of two distributions given as tensors."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .entry import Draw, Entry, Shape, moved, peer, wide
from .losses import OF_LOGITS, model_jsd


def model_kl_div(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(wide(input), target.to(wide(input).dtype), reduction="batchmean")


def model_tvd(p: Tensor, q: Tensor) -> Tensor:
    return (wide(p) - q.to(wide(p).dtype)).abs().sum() / (2 * len(p))


def _distributions(draw: Draw, shape: Shape, logarithms: tuple[bool, bool]) -> list[Tensor]:
    """Two of them, or their logarithms. The second, the teacher's, is not trained."""
    found = []
    for logarithm in logarithms:
        x = wide(draw.normal(*shape)).log_softmax(-1)
        found.append((x if logarithm else x.exp()).to(draw.dtype))
    found[0].requires_grad_()
    return found


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
        "kl_div", peer("liger_kl_div", reduction="batchmean"), (True, False), eager=model_kl_div,
        passes=moved(2, 2),
    ),
    _loss("jsd", "liger_jsd", (True, True), eager=model_jsd, passes=moved(2, 3)),
    _loss(
        "tvd", peer("liger_tvd", reduction="batchmean"), (False, False), eager=model_tvd,
        passes=moved(2, 3),
    ),
)  # fmt: skip
