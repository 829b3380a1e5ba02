"""group_norm of groups too large, or too few, for a program each, in one launch.

Every tile is reduced to moments of its channels and, by a program some places later, written: the
second reading finds it in the L2 cache. A program waits only for those that took a ticket before
it, so that the launch ends however few of them run at a time, or one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .group_pieces_kernels import group_pieces_kernel, group_sums_kernel
from .group_plan import Groups
from .launch import dependent_launch, launch


@dataclass(frozen=True)
class Parts:
    """What the tiles came to: moments (4, samples x pieces, C), statistics (4, groups)."""

    moments: Tensor
    statistics: Tensor
    pieces: int


def run(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    shape: Groups,
    eps: float,
) -> Parts:
    """Write y, or with dy dx, to `out`, if there is one."""
    plan = shape.plan
    pieces = cdiv(shape.S, plan.BLOCK_S)
    tiles = cdiv(shape.C_G, plan.BLOCK_C) * pieces
    total = shape.groups * tiles
    C = shape.G * shape.C_G
    rows = 2 if dy is None else 4
    moments = x.new_empty((rows, x.shape[0] * pieces, C), dtype=torch.float32)
    statistics = x.new_empty((rows, shape.groups), dtype=torch.float32)
    launch(
        group_pieces_kernel,
        (total if out is None else 2 * total,),
        x,
        dy,
        x,
        weight,
        bias,
        out,
        moments,
        statistics,
        x.new_zeros(1 + 2 * shape.groups, dtype=torch.int32),
        shape.G,
        shape.C_G,
        shape.S,
        shape.groups,
        tiles,
        pieces,
        total if out is None else min(total, max(tiles, plan.ahead)),
        moments.stride(0),
        shape.length,
        eps,
        HAS_DY=dy is not None,
        NEEDS_OUT=out is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        FOLD=min(8, plan.BLOCK_S),
        ENTRIES=min(1024, next_power_of_2(shape.C_G * pieces)),
        EVEN=shape.C_G % plan.BLOCK_C == 0 and shape.S % plan.BLOCK_S == 0,
        **shape.tile,
    )
    return Parts(moments, statistics, pieces)


def channel_gradients(
    parts: Parts, dweight: Tensor | None, dbias: Tensor | None, shape: Groups
) -> None:
    if dweight is None and dbias is None:
        return
    P, C = parts.moments.shape[1:]
    BLOCK_P = min(128, next_power_of_2(P))
    BLOCK_C = 8 if BLOCK_P == 128 else 16
    launch(
        group_sums_kernel,
        (cdiv(C, BLOCK_C),),
        parts.moments,
        parts.moments,
        parts.statistics,
        dweight,
        dbias,
        P,
        shape.G,
        shape.C_G,
        shape.groups,
        parts.pieces,
        parts.moments.stride(0),
        NEEDS_DWEIGHT=dweight is not None,
        NEEDS_DBIAS=dbias is not None,
        BLOCK_P=BLOCK_P,
        BLOCK_C=BLOCK_C,
        num_warps=4,
        **dependent_launch(parts.moments),
    )
