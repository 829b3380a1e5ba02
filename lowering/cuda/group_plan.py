"""x as group_norm's kernels see it, (groups, channels of a group, positions), and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .launch import WARP_SIZE, pipeline_stages, processors


@triton.jit
def per_channel(pointer, channels, group, G, C_G):
    channel = (group % G) * C_G + channels
    return tl.load(pointer + channel, mask=channels < C_G, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class GroupPlan:
    """A tile of channels and positions.

    Without pieces a program has a group, which it walks twice where the tile is not the whole of
    it. pieces is in how many the positions of a channel are dealt to programs.
    """

    BLOCK_C: int
    BLOCK_S: int
    threads: int = 128
    pieces: int = 0
    stages: int = 1

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


# The largest padded groups that one program keeps in registers, and the largest that it may walk
# twice, in elements: beyond that the groups under way do not fit in the L2 cache. On an H200, in
# ms, kept and walked: 32768 elements forward 0.085 and 0.091, backward 0.284 and 0.174; 16384
# forward 0.077 and 0.093, backward 0.191 and 0.155.
WHOLE_GROUP = 32768
WHOLE_GROUP_BACKWARD = 8192
WALKED_GROUP = 131072
PIECE_TILE = 4096


def _tile(C_G: int, S: int, elements: int) -> tuple[int, int]:
    BLOCK_S = min(next_power_of_2(S), elements)
    return min(next_power_of_2(C_G), elements // BLOCK_S), BLOCK_S


def plan_group(x: Tensor, groups: int, C_G: int, S: int, backward: bool) -> GroupPlan:
    BLOCK_C, BLOCK_S = next_power_of_2(C_G), next_power_of_2(S)
    tile = BLOCK_C * BLOCK_S
    if tile <= (WHOLE_GROUP_BACKWARD if backward else WHOLE_GROUP):
        return GroupPlan(BLOCK_C, BLOCK_S, threads=min(1024, max(128, tile // 16)))
    if C_G * S <= WALKED_GROUP and groups >= processors(x):
        if backward:
            # Prefetch pays in long walks: 64x512x64x64 0.317 ms, and 0.362 with two.
            stages = pipeline_stages(x, 2 * 4096 * x.element_size(), 4) if C_G * S >= 65536 else 1
            return GroupPlan(*_tile(C_G, S, 4096), threads=256, stages=stages)
        # A quarter of the group, at most: 64x512x64x64 0.150 ms, in eighths 0.167, in halves 0.170.
        elements = min(16384, next_power_of_2(C_G * S + 1) // 8)
        return GroupPlan(*_tile(C_G, S, elements), threads=max(256, elements // 16))
    BLOCK_C, BLOCK_S = _tile(C_G, S, PIECE_TILE)
    blocks = groups * cdiv(C_G, BLOCK_C)
    pieces = min(cdiv(S, BLOCK_S), max(1, cdiv(8 * processors(x), blocks)))
    return GroupPlan(BLOCK_C, BLOCK_S, threads=256, pieces=pieces)


@dataclass(frozen=True)
class Groups:
    """x seen as (groups, C_G, S), and how it is tiled."""

    groups: int
    G: int
    C_G: int
    S: int
    plan: GroupPlan

    @property
    def length(self) -> float:
        return float(self.C_G * self.S)

    @property
    def tile(self) -> dict[str, int]:
        plan = self.plan
        return {
            "BLOCK_C": plan.BLOCK_C,
            "BLOCK_S": plan.BLOCK_S,
            "num_warps": plan.num_warps,
        }

    @property
    def walked(self) -> bool:
        return self.plan.BLOCK_C < self.C_G or self.plan.BLOCK_S < self.S

    @property
    def channel_blocks(self) -> int:
        return self.groups * cdiv(self.C_G, self.plan.BLOCK_C)


def grouped(x: Tensor, num_groups: int, plan: GroupPlan | None, backward: bool) -> Groups:
    groups, C_G = x.shape[0] * num_groups, x.shape[1] // num_groups
    S = x.numel() // (groups * C_G)
    plan = plan or plan_group(x, groups, C_G, S, backward)
    return Groups(groups, num_groups, C_G, S, plan)
