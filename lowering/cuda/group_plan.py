"""x as group_norm's kernels see it, (groups, channels of a group, positions), and how it is
tiled."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .launch import WARP_SIZE, cdiv, next_power_of_2, processors


@triton.jit
def per_channel(pointer, channels, group, G, C_G):
    channel = (group % G) * C_G + channels
    return tl.load(pointer + channel, mask=channels < C_G, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class GroupPlan:
    """A tile of channels and positions. pieces is 0 where the tile is the whole group, and
    otherwise in how many pieces the positions of a channel are dealt to programs."""

    BLOCK_C: int
    BLOCK_S: int
    threads: int = 128
    pieces: int = 0

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


# The largest group that one program keeps in registers, in elements of the padded tile.
WHOLE_GROUP = 32768
PIECE_TILE = 4096


def plan_group(groups: int, C_G: int, S: int, processors: int) -> GroupPlan:
    BLOCK_C, BLOCK_S = next_power_of_2(C_G), next_power_of_2(S)
    tile = BLOCK_C * BLOCK_S
    if tile <= WHOLE_GROUP:
        return GroupPlan(BLOCK_C, BLOCK_S, threads=min(1024, max(128, tile // 16)))
    BLOCK_S = min(BLOCK_S, PIECE_TILE)
    BLOCK_C = min(BLOCK_C, PIECE_TILE // BLOCK_S)
    blocks = groups * cdiv(C_G, BLOCK_C)
    pieces = min(cdiv(S, BLOCK_S), max(1, cdiv(8 * processors, blocks)))
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
    def channel_blocks(self) -> int:
        return self.groups * cdiv(self.C_G, self.plan.BLOCK_C)


def grouped(x: Tensor, num_groups: int, plan: GroupPlan | None) -> Groups:
    groups, C_G = x.shape[0] * num_groups, x.shape[1] // num_groups
    S = x.numel() // (groups * C_G)
    plan = plan or plan_group(groups, C_G, S, processors(x))
    return Groups(groups, num_groups, C_G, S, plan)
