"""kl_div, jsd and tvd: the losses of two distributions given as tensors."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import Draw, Entry, Function, Shape, moved, wide
from .losses import model_jsd, truth_by_rows
from .models import VOCABULARY


def model_kl_div(input: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(wide(input), target.to(wide(input).dtype), reduction="batchmean")


def model_tvd(p: Tensor, q: Tensor) -> Tensor:
    return (wide(p) - q.to(wide(p).dtype)).abs().sum() / (2 * len(p))


def _with_batchmean(name: str) -> Any:
    """A function of Liger-Kernel, whose default reduction is the mean."""

    def made(package: Any) -> Function:
        function = getattr(package, name)
        return lambda first, second: function(first, second, reduction="batchmean")

    return made


def _distributions(draw: Draw, shape: Shape, logarithms: tuple[bool, bool]) -> list[Tensor]:
    """Two of them, or their logarithms. The second, the teacher's, is not trained."""
    found = []
    for logarithm in logarithms:
        x = wide(draw.normal(*shape)).log_softmax(-1)
        found.append((x if logarithm else x.exp()).to(draw.dtype))
    found[0].requires_grad_()
    return found


ENTRIES = (
    Entry(
        op="kl_div",
        ours=liger_ops.kl_div,
        eager=model_kl_div,
        peers={"liger-kernel": _with_batchmean("liger_kl_div")},
        dims=("M", "V"),
        inputs=lambda draw, shape: _distributions(draw, shape, (True, False)),
        # The backward reads the target and writes input's gradient.
        passes=moved(2, 2),
        figures=((8192, 32768), (8192, 151936)),
        models=VOCABULARY,
        small=(256, 32768),
        truth=truth_by_rows,
    ),
    Entry(
        op="jsd",
        ours=liger_ops.jsd,
        eager=model_jsd,
        peers={"liger-kernel": "liger_jsd"},
        dims=("M", "V"),
        inputs=lambda draw, shape: _distributions(draw, shape, (True, True)),
        passes=moved(2, 3),
        figures=((8192, 32768), (8192, 151936)),
        models=VOCABULARY,
        small=(256, 32768),
        truth=truth_by_rows,
    ),
    Entry(
        op="tvd",
        ours=liger_ops.tvd,
        eager=model_tvd,
        peers={"liger-kernel": _with_batchmean("liger_tvd")},
        dims=("M", "V"),
        inputs=lambda draw, shape: _distributions(draw, shape, (False, False)),
        passes=moved(2, 3),
        figures=((8192, 32768), (8192, 151936)),
        models=VOCABULARY,
        small=(256, 32768),
        truth=truth_by_rows,
    ),
)
