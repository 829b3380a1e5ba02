"""What the launches of all GPU kernels share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

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
            _launch(kernel, grid, device, args, constants)
    else:
        _launch(kernel, grid, device, args, constants)


# By everything that Triton compiles a kernel for: what it compiled, its grid, and the constants to
# pass after the arguments.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[int, int, int], list[Any]]] = {}

# Every size of a batch is a form of its own.
MOST_COMPILED = 4096
# Of an address; Triton tells apart the multiples of 16.
ALIGNMENT = 64


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: int | None,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """`kernel[grid](*args, **constants)`, which takes 12 us to find what it has compiled, in 7.

    Triton compiles a kernel for the dtypes of tensors and whether they are aligned, for the types
    of numbers and some of their values, for constants, and for its settings. Here all values of
    numbers and of settings are told apart.
    """
    passed, form = list(args), list(map(type, args))
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            passed[i] = address = arg.data_ptr()
            form[i] = arg.dtype
            form.append(address % ALIGNMENT)
        else:
            form.append(arg)
    key = (kernel.fn, grid, device, *form, *constants, *constants.values())
    if vars(knobs.runtime) or vars(knobs.compilation):
        key += (*vars(knobs.runtime).items(), *vars(knobs.compilation).items())
    known = _COMPILED.get(key)
    if known is not None and not _hooked(kernel):
        compiled, grid, others = known
        stream = driver.active.get_current_stream(device)
        loaded = (compiled.function, compiled.packed_metadata)
        compiled.run(*grid, stream, *loaded, None, None, None, *passed, *others)
        return
    compiled = kernel[grid](*args, **constants)
    # The interpreter compiles nothing. On AMD's GPUs Triton tells apart the sizes of tensors too.
    if compiled is None or torch.version.hip:
        return
    if len(_COMPILED) >= MOST_COMPILED:
        _COMPILED.clear()
    others = [constants[name] for name in kernel.arg_names[len(args) :]]
    _COMPILED[key] = (compiled, (*grid, 1, 1)[:3], others)


def _hooked(kernel: Any) -> bool:
    """Whether somebody, such as a profiler, asked to be called at launches: Triton does that."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(
        kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    )
