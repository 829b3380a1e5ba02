"""x as group_norm's kernels see it, (groups, channels of a group, positions), and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..sizes import next_power_of_2
from .launch import WARP_SIZE, Plan, Tiles, plan_for, processors


@triton.jit
def per_channel(pointer, channels, group, G, C_G):
    # The group's part of the address apart: it is int64, and one for all channels.
    pointer += (group % G) * C_G
    return tl.load(pointer + channels, mask=channels < C_G, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class GroupPlan:
    """A tile of channels and positions.

    A program has a group, which it walks twice where the tile is not the whole of it, `unroll`
    tiles at a time, of which it keeps the last `kept`; or each has a tile, reduced at least `ahead`
    tiles before it is written. A backward that walks has tiles of all the group's channels.
    """

    BLOCK_C: int
    BLOCK_S: int
    threads: int = 128
    ahead: int = 0
    unroll: int = 1
    kept: int = 1

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


# The largest padded groups that one program keeps in registers, in elements. On an H200, in ms,
# kept and walked: forward, 2048 groups of 8192 0.023 and 0.024, of 32768 0.084 and 0.074; backward,
# of 8192 0.070 and 0.039.
WHOLE_GROUP = 8192
WHOLE_GROUP_BACKWARD = 4096

# By the elements of a group, which are all in tiles of BLOCK_N; stages is how many are unrolled. Of
# larger groups those under way do not fit in the L2 cache: forward, 256 of 262144 0.095 ms as in
# pieces, backward, of 163840 0.106 and in pieces 0.100.
WALKS: Tiles = {
    # 512 groups of 20480 0.014 ms, of 40960 0.028, 2048 of 65536 0.144, 256 of 131072 0.042, 512 of
    # 163840 0.105.
    2: (
        (32768, Plan(1, 4096, 512, stages=2)),
        (61440, Plan(1, 8192, 1024, stages=2)),
        (65536, Plan(1, 8192, 1024, stages=4)),
        (98304, Plan(1, 8192, 1024, stages=2)),
        (131072, Plan(1, 8192, 1024, kept=6)),
        (163840, Plan(1, 16384, 1024, kept=2)),
        (262144, Plan(1, 16384, 1024, stages=4)),
    ),
    # 512 groups of 20480 0.030 ms, of 40960 0.052, 2048 of 65536 0.286, 256 of 131072 0.091.
    4: (
        (32768, Plan(1, 4096, 512, stages=2)),
        (49152, Plan(1, 8192, 512, stages=2)),
        (65536, Plan(1, 8192, 1024, kept=4)),
        (163840, Plan(1, 16384, 1024, kept=2)),
    ),
}
BACKWARD_WALKS: Tiles = {
    # 512 groups of 20480 0.030 ms, 2048 of 32768 0.124, 512 of 40960 0.049, 2048 of 65536 0.222,
    # 512 of 131072 0.144.
    2: (
        (24576, Plan(1, 4096, 512, stages=2)),
        (32768, Plan(1, 16384, 1024)),
        (49152, Plan(1, 8192, 1024, stages=2)),
        (65536, Plan(1, 8192, 1024, kept=4)),
        (131072, Plan(1, 16384, 1024, kept=2)),
    ),
    # 512 groups of 20480 0.049 ms, of 40960 0.086, 2048 of 65536 0.491, 256 of 131072 0.158.
    4: (
        (8192, Plan(1, 4096, 512, stages=2)),
        (32768, Plan(1, 8192, 512)),
        (131072, Plan(1, 16384, 1024)),
    ),
}
# Positions of a backward's tile, at least: 64 bytes of bfloat16.
LEAST_POSITIONS = 32


def _tile(C_G: int, S: int, elements: int) -> tuple[int, int]:
    BLOCK_S = min(next_power_of_2(S), elements)
    return min(next_power_of_2(C_G), elements // BLOCK_S), BLOCK_S


def _walk(x: Tensor, groups: int, C_G: int, S: int, backward: bool) -> GroupPlan | None:
    """The plan of a program to a group, if groups are small enough, and enough of them.

    32 groups of 65536 take 0.009 ms, in pieces 0.013; backward, in float32, 0.021 and 0.019.
    """
    few = 5 * groups < processors(x) * (1 if not backward and C_G * S <= 65536 else 2)
    walk = plan_for(x, BACKWARD_WALKS if backward else WALKS, C_G * S)
    if few or walk is None:
        return None
    tile = _tile(C_G, S, walk.BLOCK_N)
    if backward:
        BLOCK_C = next_power_of_2(C_G)
        tile = BLOCK_C, walk.BLOCK_N // BLOCK_C
        if tile[1] < LEAST_POSITIONS:
            return None
    return GroupPlan(*tile, walk.threads, unroll=walk.stages, kept=walk.kept)


def plan_group(x: Tensor, groups: int, C_G: int, S: int, backward: bool) -> GroupPlan:
    BLOCK_C, BLOCK_S = next_power_of_2(C_G), next_power_of_2(S)
    tile = BLOCK_C * BLOCK_S
    if tile <= (WHOLE_GROUP_BACKWARD if backward else WHOLE_GROUP):
        return GroupPlan(BLOCK_C, BLOCK_S, threads=min(1024, max(128, tile // 16)))
    walk = _walk(x, groups, C_G, S, backward)
    if walk is not None:
        return walk
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
    processors: int

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
    def programs(self) -> int:
        """Where a group is one program's; see `group_walk`."""
        one_each = self.plan.kept == 1 or not self.walked
        return self.groups if one_each else min(self.groups, self.processors)


def grouped(x: Tensor, num_groups: int, plan: GroupPlan | None, backward: bool) -> Groups:
    groups, C_G = x.shape[0] * num_groups, x.shape[1] // num_groups
    S = x.numel() // (groups * C_G)
    plan = plan or plan_group(x, groups, C_G, S, backward)
    return Groups(groups, num_groups, C_G, S, plan, processors(x))
