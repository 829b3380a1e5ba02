"""Plans, facts of the GPU, and the launch that all cuda kernels share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..common.sizes import cdiv, next_power_of_2
from .compiled import launch_compiled

# The largest block has 1024 threads: 32 warps on NVIDIA, 16 on AMD's data-centre GPUs.
WARP_SIZE = 64 if torch.version.hip else 32

# Under the interpreter. It is small, so that a program of a persistent kernel has several tiles.
INTERPRETED_PROCESSORS = 3

# Bytes of shared memory that every GPU gives a program, and that Triton's reductions may take: up
# to 128 bytes a row of a tile.
MINIMAL_SHARED_MEMORY = 48 * 1024
REDUCTION_SCRATCH = 2048


@dataclass(frozen=True)
class Plan:
    """How a kernel is launched: columns of a tile, and threads of a program.

    An algorithm is a subclass: host code launches the kernel that the plan's type names.
    """

    BLOCK_N: int
    threads: int = 128

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // WARP_SIZE)


@dataclass(frozen=True)
class Tile(Plan):
    """A program has one tile of an elementwise kernel."""

    BLOCK_M: int = 1


@dataclass(frozen=True)
class WholeRow(Plan):
    """A program holds whole rows in registers and reads them once: BLOCK_N is at least their width.

    A persistent kernel has `programs` of them, which take turns at the tiles and load `num_stages`
    tiles ahead.
    """

    BLOCK_M: int = 1
    programs: int = 0
    num_stages: int = 1


@dataclass(frozen=True)
class TwoPass(Plan):
    """A program reads its row twice, in tiles: first for the row's sums, then to write the result.

    `unroll` is how many tiles a turn of the loops takes.
    """

    unroll: int = 1


T = TypeVar("T")

# By the bytes of an element, 2 or 4: the largest width that each entry is for, in ascending order.
Table = dict[int, tuple[tuple[float, T], ...]]


def plan_for(x: Tensor, table: Table[T], width: int) -> T | None:
    """The table's first entry for elements of x's size that is for this width."""
    of_size = table[4 if x.element_size() == 4 else 2]
    return next((plan for widest, plan in of_size if width <= widest), None)


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


def compute_capability(x: Tensor) -> int:
    """The major version of the GPU that holds x."""
    return int(_properties(x.device.index).major)


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Options for programmatic dependent launch: if DEPENDENT, the kernel waits for the one before.

    From Hopper on the GPU sets it up while that kernel ends: rms_norm's backward of 2048 x 4096
    takes 23 us on an H200, and 24 without it.
    """
    dependent = on_nvidia(x) and _properties(x.device.index).major >= 9
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def pipeline_stages(x: Tensor, tile_bytes: int, wanted: int = 3) -> int:
    """num_stages of a loop: `wanted`, or as many as shared memory holds.

    One stage loads nothing ahead. Each further stage holds one tile of each tensor that the loop
    loads, `tile_bytes` together, in shared memory.
    """
    capacity = MINIMAL_SHARED_MEMORY
    if x.is_cuda:
        properties = _properties(x.device.index)
        capacity = getattr(properties, "shared_memory_per_block_optin", capacity)
    return max(1, min(wanted, 1 + (capacity - REDUCTION_SCRATCH) // tile_bytes))


def rows(x: Tensor) -> Tensor:
    """x as (M, N) with unit stride in the last dimension: a view if possible, else a copy."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch kernel on the GPU that holds x, which need not be the current one.

    `args` are the kernel's first parameters, among them all tensors; `constants` are the other
    parameters and Triton's options.
    """
    device = x.device.index
    if x.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_compiled(kernel, grid, device, args, constants)
    else:
        launch_compiled(kernel, grid, device, args, constants)


@functools.cache
def plan_whole_rows(N: int, most_threads: int, thread_elements: int = 16) -> WholeRow:
    """One row a tile, or as many narrow ones as make 2048 elements."""
    BLOCK_N = next_power_of_2(N)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = max(128, BLOCK_M * BLOCK_N // thread_elements)
    return WholeRow(BLOCK_N, min(most_threads, threads), BLOCK_M)


def launch_whole_rows(kernel: Any, plan: WholeRow, x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a program for each tile of x's rows."""
    sizes = {"BLOCK_M": plan.BLOCK_M, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    launch(kernel, (cdiv(x.shape[0], plan.BLOCK_M),), x, *args, **constants, **sizes)
