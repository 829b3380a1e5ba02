"""The shape of x in group_norm's kernels, (groups, channels of a group, positions), and tiles of
it."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...launch import WARP_SIZE


@triton.jit
def per_channel(pointer, channels, group, G, C_G):
    # Load a number for each channel of the group as float32. The group's part of the address is
    # added first: it is int64, and the same for all channels.
    pointer += (group % G) * C_G
    return tl.load(pointer + channels, mask=channels < C_G, other=0.0).to(tl.float32)


@dataclass(frozen=True)
class GroupPlan:
    """A tile of channels and positions, and threads of a program. An algorithm is a subclass."""

    BLOCK_C: int
    BLOCK_S: int
    threads: int = 128

    @property
    def options(self) -> dict[str, int]:
        return {
            "BLOCK_C": self.BLOCK_C,
            "BLOCK_S": self.BLOCK_S,
            "num_warps": max(1, self.threads // WARP_SIZE),
        }


@dataclass(frozen=True)
class GroupedShape:
    """The shape of x as (groups, C_G, S), with G groups in a sample, C_G channels in a group and S
    positions."""

    groups: int
    G: int
    C_G: int
    S: int

    @classmethod
    def of(cls, x: Tensor, num_groups: int) -> GroupedShape:
        groups, C_G = x.shape[0] * num_groups, x.shape[1] // num_groups
        return cls(groups, num_groups, C_G, x.numel() // (groups * C_G))

    @property
    def size(self) -> int:
        """The elements of a group."""
        return self.C_G * self.S

    @property
    def arguments(self) -> tuple[int, int, int, float]:
        return self.G, self.C_G, self.S, float(self.size)
