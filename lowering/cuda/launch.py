"""What the launches of all GPU kernels share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiled import launch_compiled

# 1024 threads make the largest block, which is 32 warps of NVIDIA and 16 of AMD's data-centre GPUs.
WARP_SIZE = 64 if torch.version.hip else 32

# The interpreter's stand-in, small so that programs of a persistent kernel walk several tiles.
INTERPRETED_PROCESSORS = 3

# Every GPU gives a program this much shared memory; Triton's reductions take up to 128 bytes a row
# of a tile.
MINIMAL_SHARED_MEMORY = 48 * 1024
REDUCTION_SCRATCH = 2048


class Plan(NamedTuple):
    """How a kernel is launched: rows and columns a tile, threads a program, and programs.

    `programs` is 0 where the kernel is not persistent and the grid follows from the tile. `stages`
    is how many tiles, or rows, a loop has under way, `kept` how many tiles stay in registers
    between two walks.
    """

    BLOCK_M: int
    BLOCK_N: int
    threads: int = 128
    programs: int = 0
    stages: int = 1
    kept: int = 1

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


# For 2 and for 4 bytes an element: the widest row that a plan is for, in ascending order.
Tiles = dict[int, tuple[tuple[float, Plan], ...]]


def plan_for(x: Tensor, tiles: Tiles, width: int) -> Plan | None:
    """The first of the plans that is for elements of x's size and rows of that width."""
    of_size = tiles[4 if x.element_size() == 4 else 2]
    return next((plan for widest, plan in of_size if width <= widest), None)


def walk_plan(x: Tensor, tiles: Tiles) -> Plan:
    """The plan for rows as wide as x's, walked in tiles, of a table that ends in infinity."""
    plan = plan_for(x, tiles, x.shape[1])
    assert plan is not None
    return plan


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def processors(x: Tensor) -> int:
    """The multiprocessors of the GPU that holds x."""
    return (
        _properties(x.device.index).multi_processor_count if x.is_cuda else INTERPRETED_PROCESSORS
    )


def on_nvidia(x: Tensor) -> bool:
    """Whether kernels that take x may hold PTX."""
    return x.is_cuda and torch.version.hip is None


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Options for a kernel that waits by itself, if DEPENDENT, for the one launched before it.

    From Hopper on it is set up while that one ends: rms_norm's backward of 2048 x 4096 takes 23 us
    on an H200, and 24 where it is not.
    """
    dependent = on_nvidia(x) and _properties(x.device.index).major >= 9
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


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
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Run kernel on the GPU that holds x, which need not be the current one.

    `args` are the kernel's first parameters, and all its tensors; `constants` are its other
    parameters, and Triton's options.
    """
    device = x.device.index
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_compiled(kernel, grid, device, args, constants)
    else:
        launch_compiled(kernel, grid, device, args, constants)
