"""What the launches of all GPU kernels share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 1024 threads make the largest block, which is 32 warps of NVIDIA and 16 of AMD's data-centre GPUs.
WARP_SIZE = 64 if torch.version.hip else 32

# The interpreter's stand-in, small so that programs of a persistent kernel walk several tiles.
INTERPRETED_PROCESSORS = 3

# Every GPU gives a program this much shared memory; Triton's reductions take up to 128 bytes a row
# of a tile.
MINIMAL_SHARED_MEMORY = 48 * 1024
REDUCTION_SCRATCH = 2048


@dataclass(frozen=True)
class Plan:
    """How a kernel is launched: rows and columns a tile, threads a program, and programs.

    `programs` is 0 where the kernel is not persistent and the grid follows from the tile.
    """

    BLOCK_M: int
    BLOCK_N: int
    threads: int = 128
    programs: int = 0
    stages: int = 1

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def processors(x: Tensor) -> int:
    """The multiprocessors of the GPU that holds x."""
    return (
        _properties(x.device.index).multi_processor_count if x.is_cuda else INTERPRETED_PROCESSORS
    )


def pipeline_stages(x: Tensor, tile_bytes: int, wanted: int = 3) -> int:
    """How many tiles deep a loop may prefetch: `wanted` at most, and what shared memory holds.

    One stage is no prefetch; each further one holds a tile, the loop's loads together, in shared
    memory.
    """
    capacity = MINIMAL_SHARED_MEMORY
    if x.is_cuda:
        properties = _properties(x.device.index)
        capacity = getattr(properties, "shared_memory_per_block_optin", capacity)
    return max(1, min(wanted, 1 + (capacity - REDUCTION_SCRATCH) // tile_bytes))


def rows(x: Tensor) -> Tensor:
    """x as (M, N) with unit stride in the last dimension: a view wherever there is one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **options: Any) -> None:
    """Run kernel on the GPU that holds x, which need not be the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
