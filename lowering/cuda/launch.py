"""Plans, properties of the GPU, and the launch, for all cuda kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..common.tensors import cdiv, next_power_of_2
from .compiled import launch_compiled

# The largest block has 1024 threads: 32 warps on NVIDIA, 16 on AMD's data-centre GPUs.
WARP_SIZE = 64 if torch.version.hip else 32

# Multiprocessors that the interpreter stands for. Few, so that a program of a persistent kernel has
# several tiles.
INTERPRETED_PROCESSORS = 3

# Bytes of shared memory that every GPU has for a program.
MINIMAL_SHARED_MEMORY = 48 * 1024
# Bytes of it that Triton's reductions may take: up to 128 for each row of a tile.
REDUCTION_SCRATCH = 2048


@dataclass(frozen=True)
class Plan:
    """The launch configuration of a kernel: columns of a tile, and threads of a program.

    Each algorithm of an op is a subclass: the plan's type tells host code which kernel to launch.
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

# Bytes of an element, 2 or 4 -> (the largest width that the plan is for, the plan), in ascending
# order of widths.
Table = dict[int, tuple[tuple[float, T], ...]]


def plan_for(x: Tensor, table: Table[T], width: int) -> T | None:
    """Return the table's plan for elements of x's size and rows of this width, or None if the
    width is above the table's largest."""
    of_size = table[4 if x.element_size() == 4 else 2]
    return next((plan for widest, plan in of_size if width <= widest), None)


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def processors(x: Tensor) -> int:
    """Return the number of multiprocessors of the GPU that holds x."""
    return (
        _properties(x.device.index).multi_processor_count if x.is_cuda else INTERPRETED_PROCESSORS
    )


def on_nvidia(x: Tensor) -> bool:
    """Return whether x is on a GPU of NVIDIA, so that kernels that take it may hold PTX."""
    return x.is_cuda and torch.version.hip is None


def input_precision(x: Tensor) -> str:
    """Return the `input_precision` of `tl.dot` by which float32 is multiplied as PyTorch's own
    products on the GPU that holds x: "tf32" if one of PyTorch's switches says so, or "ieee"."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 and on_nvidia(x) else "ieee"


def compute_capability(x: Tensor) -> int:
    """Return the major version of the compute capability of the GPU that holds x."""
    return int(_properties(x.device.index).major)


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Return the options for programmatic dependent launch: if DEPENDENT, the kernel itself waits
    for the kernel before it (`gdc_wait`).

    From Hopper on, the GPU sets the kernel up while the one before it ends: rms_norm's backward of
    2048 x 4096 takes 23 us on an H200, and 24 without it. A dependent kernel may not read what
    earlier kernels wrote before it has waited.
    """
    dependent = on_nvidia(x) and _properties(x.device.index).major >= 9
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def shared_memory(x: Tensor) -> int:
    """Return the bytes of shared memory that a program may have on the GPU that holds x."""
    properties = _properties(x.device.index) if x.is_cuda else None
    return getattr(properties, "shared_memory_per_block_optin", MINIMAL_SHARED_MEMORY)


def pipeline_stages(x: Tensor, tile_bytes: int, wanted: int = 3) -> int:
    """Return num_stages of a loop: `wanted`, or as many as fit in shared memory.

    One stage loads nothing ahead. Each further stage holds one tile of each tensor that the loop
    loads, `tile_bytes` together, in shared memory.
    """
    return max(1, min(wanted, 1 + (shared_memory(x) - REDUCTION_SCRATCH) // tile_bytes))


def rows(x: Tensor) -> Tensor:
    """Return x as (M, N) with unit stride in the last dimension: a view if possible, or a copy."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch the kernel on the GPU that holds x, which need not be the current one.

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
    """Plan a tile of one row, or of as many narrow rows as make 2048 elements."""
    BLOCK_N = next_power_of_2(N)
    BLOCK_M = max(1, 2048 // BLOCK_N)
    threads = max(128, BLOCK_M * BLOCK_N // thread_elements)
    return WholeRow(BLOCK_N, min(most_threads, threads), BLOCK_M)


def launch_whole_rows(kernel: Any, plan: WholeRow, x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a program for each tile of x's rows."""
    sizes = {"BLOCK_M": plan.BLOCK_M, "BLOCK_N": plan.BLOCK_N, "num_warps": plan.num_warps}
    launch(kernel, (cdiv(x.shape[0], plan.BLOCK_M),), x, *args, **constants, **sizes)
