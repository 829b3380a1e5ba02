"""x as group_norm's kernels see it, (groups, channels of a group, positions), and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import next_power_of_2
from .launch import WARP_SIZE, processors


@triton.jit
def per_channel(pointer, channels, group, G, C_G):
    channel = (group % G) * C_G + channels
    return tl.load(pointer + channel, mask=channels < C_G, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class GroupPlan:
    """A tile of channels and positions.

    A program has a group, which a forward walks twice where the tile is not the whole of it; or
    each has a tile, reduced at least `ahead` tiles before it is written.
    """

    BLOCK_C: int
    BLOCK_S: int
    threads: int = 128
    ahead: int = 0

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


# The largest padded groups that one program keeps in registers, in elements, and the largest that
# one may walk twice: beyond that the groups under way do not fit in the L2 cache. On an H200, in
# ms: forward, kept and walked, 32768 elements 0.085 and 0.091, 16384 0.077 and 0.093; backward,
# kept and in pieces, 2048 groups of 4096 elements 0.033 and 0.034, of 8192 0.076 and 0.051, but 128
# groups of 16384 0.014 and 0.016.
WHOLE_GROUP = 32768
WHOLE_GROUP_BACKWARD = 4096
WHOLE_GROUP_BACKWARD_OF_FEW = 16384
WALKED_GROUP = 131072


def _tile(C_G: int, S: int, elements: int) -> tuple[int, int]:
    BLOCK_S = min(next_power_of_2(S), elements)
    return min(next_power_of_2(C_G), elements // BLOCK_S), BLOCK_S


def plan_group(x: Tensor, groups: int, C_G: int, S: int, backward: bool) -> GroupPlan:
    BLOCK_C, BLOCK_S = next_power_of_2(C_G), next_power_of_2(S)
    tile = BLOCK_C * BLOCK_S
    kept = WHOLE_GROUP
    if backward:
        few = groups <= processors(x)
        kept = WHOLE_GROUP_BACKWARD_OF_FEW if few else WHOLE_GROUP_BACKWARD
    if tile <= kept:
        return GroupPlan(BLOCK_C, BLOCK_S, threads=min(1024, max(128, tile // 16)))
    if not backward and C_G * S <= WALKED_GROUP and groups >= processors(x):
        # A quarter of the group, at most: 64x512x64x64 0.150 ms, in eighths 0.167, in halves 0.170.
        elements = min(16384, next_power_of_2(C_G * S + 1) // 8)
        return GroupPlan(*_tile(C_G, S, elements), threads=max(256, elements // 16))
    # Reduced as far ahead as programs run at once. In ms, for 4x320x128x128 and 64x512x64x64:
    # backward 0.059 and 0.283, half as far 0.061 and 0.319, twice as far 0.061 and 0.328, tiles of
    # 8192 0.059 and 0.339. Forward 0.036 for 4x320x128x128, with tiles of 4096 0.042.
    tile, threads = (4096, 128) if backward else (8192, 256)
    return GroupPlan(*_tile(C_G, S, tile), threads, ahead=8 * processors(x))


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


def grouped(x: Tensor, num_groups: int, plan: GroupPlan | None, backward: bool) -> Groups:
    groups, C_G = x.shape[0] * num_groups, x.shape[1] // num_groups
    S = x.numel() // (groups * C_G)
    plan = plan or plan_group(x, groups, C_G, S, backward)
    return Groups(groups, num_groups, C_G, S, plan)
