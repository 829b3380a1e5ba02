"""Limits of a vector core (Unified Buffer, cores, grid) and the tile sizes that fit them.

docs/internals/tiles_and_unified_buffer.md explains the choice with an example.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from ..common.tensors import cdiv, contiguous, next_power_of_2

# The runtime refuses a grid of 65536 programs.
MAX_PROGRAMS = 65535

# For Triton's interpreter, which has no driver to ask. The buffer is that of a 910B core; the cores
# are few, so that a program has several tiles, as on a device.
INTERPRETED_UB_BYTES = 196608
INTERPRETED_VECTOR_CORES = 3

# 16 elements of the narrowest dtype are 32 bytes, one block of the Unified Buffer.
MIN_BLOCK_N = 16
# More rows are not copied faster, and each statistic of a row takes a block of 32 bytes.
MAX_BLOCK_M = 64
# A tile of several rows is assumed to take this many times the buffer of one row with as many
# elements. CANN's planners gave every tile that this allows 90% of the buffer or less.
SEVERAL_ROWS = 1.9
# The planner's figure differs between versions of CANN; the other 10% cover that.
UB_SHARE = 0.9

# The least elements in a piece of a kept row. An instruction on few elements takes longer to start
# than to run: rather than keep the weights beside narrower pieces, a kernel reads the weights again
# with every row.
MIN_PIECE_WITH_WEIGHTS = 512
MIN_PIECE = 256


@dataclass(frozen=True)
class Kept:
    """The cost of a kernel that keeps a row in its own dtype and computes it in pieces.

    row: Itemsize of the stored tensor -> bytes of Unified Buffer per element of the kept row.
    piece: The same per element of a piece, which is float32.
    weights: Whether the weights are kept beside the row, in their own dtype. `row` excludes their
        bytes, and those of the float32 sums of their gradients: `rows_plan` adds what a column of
        the call takes.
    padding: Bytes to add per element of a piece if the row does not fill its last piece.
    """

    row: dict[int, float]
    piece: dict[int, float]
    weights: bool = False
    padding: float = 0


@dataclass(frozen=True)
class Cost:
    """The cost of an op's kernels: itemsize of the stored tensor -> bytes per element of the tile.

    whole: The kernel for rows that fit a tile; empty if there is none.
    wide: The kernel for rows that fit neither a tile nor the buffer, and any elementwise kernel.
    padding: Bytes to add to `whole` if the row is narrower than the tile.
    kept: The kernels that keep a row in the buffer, from the one that keeps the fewest tensors to
        the one that keeps the most.
    """

    whole: dict[int, float]
    wide: dict[int, float]
    padding: float = 0
    kept: tuple[Kept, ...] = ()


# Name of a kernel -> its cost, added by the kernel's file. The comment above an entry gives
# measured shares of 196608 bytes by tile, "bf16 | fp32" or one number for both: the largest that
# the planners of ascendnpu-ir 1.0.0, 1.1.0 and 1.2.0 take. An entry is about share * 196608 /
# elements of the tile. 90% is 43.2 bytes per element at 4096 elements, and 86.4 at 2048.
COSTS: dict[str, Cost] = {}


@dataclass(frozen=True)
class Plan:
    """The tile of a kernel, BLOCK_M rows of BLOCK_N columns, and the largest number of programs.

    If the level KEPT is not 0, a row (or a group) stays in the buffer as ROW elements, padded to a
    power of two, and the tile is one piece of it. The level says which tensors stay: level i is
    `Cost.kept[i - 1]`, and a higher level keeps more.
    """

    BLOCK_M: int
    BLOCK_N: int
    cores: int
    ROW: int = 0
    KEPT: int = 0

    def whole(self, N: int) -> bool:
        """Return whether a row of N columns fits the tile."""
        return self.BLOCK_N >= N

    def programs(self, tiles: int) -> int:
        """Return the size of the grid: one program per core, or per tile if these are fewer."""
        return min(self.cores, tiles)

    def splits(self, tiles: int, chunks: int) -> int:
        """Return the number of splits of each column chunk's row tiles.

        A work item is a chunk and a split, and stores its own partial sums. There are at most 4
        items per core, unless the chunks alone are more.
        """
        return max(1, min(tiles, 4 * self.cores // chunks))


@dataclass(frozen=True)
class GroupShape:
    """The sizes of x as (batch * G, C_G, S): groups, channels of a group, and positions."""

    batch: int
    G: int
    C_G: int
    S: int

    @classmethod
    def of(cls, x: Tensor, num_groups: int) -> GroupShape:
        batch, channels = x.shape[:2]
        return cls(batch, num_groups, channels // num_groups, x.numel() // (batch * channels))

    @property
    def groups(self) -> int:
        """The number of groups of all samples."""
        return self.batch * self.G

    @property
    def length(self) -> float:
        """The number of elements of a group."""
        return float(self.C_G * self.S)

    @property
    def flat(self) -> bool:
        """True if there is one position only: the tile's last axis is then the channels."""
        return self.S == 1

    @property
    def is_row(self) -> bool:
        """True if a sample is one group with one position: it is then a row of layer_norm."""
        return self.flat and self.G == 1

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and the columns that a tile of a whole group needs."""
        return (1, self.C_G) if self.flat else (self.C_G, self.S)

    def fits(self, plan: Plan) -> bool:
        """Return whether a group fits the tile."""
        return self.sizes[0] <= plan.BLOCK_M and self.sizes[1] <= plan.BLOCK_N

    def layout(self, plan: Plan) -> dict[str, bool]:
        """Return the constexpr arguments of the kernels for groups that fit the tile."""
        return {"FLAT": self.flat, "PADDED": self.sizes != (plan.BLOCK_M, plan.BLOCK_N)}

    def kept_layout(self, plan: Plan) -> dict[str, int]:
        """Return the constexpr arguments of the kernels for kept groups.

        CHANNELS are the padded channels of the kept tile; PADDED is whether a piece may have
        elements beyond the group.
        """
        padded = self.C_G % plan.BLOCK_M != 0 or plan.BLOCK_N != self.S
        return {"CHANNELS": plan.ROW // plan.BLOCK_N, "PADDED": padded}


def plan(
    op: str, N: int, *tensors: Tensor | None,
    weights: Sequence[Tensor | None] = (), gradients: Sequence[Tensor | None] = (),
) -> Plan:  # fmt: skip
    """Choose the plan of an op for rows of N columns and the dtypes of `tensors` on this machine.

    gradients: The outputs for the gradients of the weights. A kernel that keeps rows also keeps
        their float32 sums.
    """
    column = sum(weight.element_size() for weight in weights if weight is not None)
    sums = sum(4 for gradient in gradients if gradient is not None)
    return rows_plan(op, N, _itemsizes(*tensors), ub_bytes(), vector_cores(), column, sums)


def group_plan(op: str, shape: GroupShape, *tensors: Tensor) -> Plan:
    """Choose the plan of an op for groups and the dtypes of `tensors` on this machine."""
    return groups_plan(op, shape, _itemsizes(*tensors), ub_bytes(), vector_cores())


def _itemsizes(*tensors: Tensor | None) -> set[int]:
    return {tensor.element_size() for tensor in tensors if tensor is not None}


def rows_plan(
    op: str, N: int, itemsizes: set[int], ub_bytes: int, cores: int,
    weights: int = 0, sums: int = 0,
) -> Plan:  # fmt: skip
    """Choose the plan of an op for rows of N columns.

    The first that fits: a tile of whole rows; a kept row, from the highest level down; chunks of a
    row that does not stay.

    itemsizes: Of the tensors with rows; the most expensive decides.
    weights: Bytes of all weights per column.
    sums: Bytes of the sums of the weights' gradients per column.
    """
    cost = COSTS[op]
    block_n = max(MIN_BLOCK_N, next_power_of_2(N))
    if cost.whole:
        padding = cost.padding if block_n > N else 0
        whole = max(map(cost.whole.get, itemsizes)) + padding
        if block_n <= tile_elements(whole, ub_bytes):
            rows = tile_elements(SEVERAL_ROWS * whole, ub_bytes) // block_n
            return Plan(min(MAX_BLOCK_M, max(1, rows)), block_n, cores)
    # From the level that keeps the most tensors, and so reads the fewest of them twice.
    for level, kept in reversed(list(enumerate(cost.kept, 1))):
        column = max(map(kept.row.get, itemsizes)) + sums + weights * kept.weights
        left = ub_bytes * UB_SHARE - block_n * column
        taken = max(map(kept.piece.get, itemsizes))
        piece = piece_elements(taken, left, block_n)
        if piece and N % piece:
            # The last piece is padded, which costs more, and may make the pieces narrower.
            piece = piece_elements(taken + kept.padding, left, block_n)
        if piece >= (MIN_PIECE_WITH_WEIGHTS if kept.weights else MIN_PIECE):
            return Plan(1, piece, cores, block_n, level)
    return Plan(
        1, chunk_width(N, tile_elements(max(map(cost.wide.get, itemsizes)), ub_bytes)), cores
    )


def piece_elements(cost: float, left: float, row: int) -> int:
    """Return the elements of the widest piece that fits `left` bytes at `cost` bytes per element.

    A piece is a power of two and at most half a row. Return 0 if none fits.
    """
    elements = min(int(left / cost), row // 2)
    return 0 if elements < 1 else 1 << (elements.bit_length() - 1)


def elementwise_plan(op: str, M: int, N: int, *tensors: Tensor | None) -> Plan:
    """Choose the plan of an elementwise op for the dtypes of `tensors` on this machine."""
    return tiles_plan(op, M, N, _itemsizes(*tensors), ub_bytes(), vector_cores())


def tiles_plan(op: str, M: int, N: int, itemsizes: set[int], ub_bytes: int, cores: int) -> Plan:
    """Choose the plan of an elementwise op: the largest tiles that leave no core idle."""
    cost = COSTS[op].wide
    share = max(MIN_BLOCK_N, next_power_of_2(cdiv(M * N, cores)))
    elements = min(tile_elements(max(map(cost.get, itemsizes)), ub_bytes), share)
    block_n = max(MIN_BLOCK_N, next_power_of_2(N))
    if block_n > elements:
        return Plan(1, chunk_width(N, elements), cores)
    return Plan(min(MAX_BLOCK_M, elements // block_n), block_n, cores)


def groups_plan(op: str, shape: GroupShape, itemsizes: set[int], ub_bytes: int, cores: int) -> Plan:
    """Choose the plan of an op for groups: whole groups, a kept group, or pieces of channels."""
    cost = COSTS[op]
    block_m, block_n = (next_power_of_2(size) for size in shape.sizes)
    block_n = max(MIN_BLOCK_N, block_n)
    elements = tile_elements(max(map(cost.whole.get, itemsizes)), ub_bytes)
    if shape.flat:
        # The channel sums of a flat tile are as wide as the tile.
        elements //= 2
    if block_m <= MAX_BLOCK_M and block_m * block_n <= elements:
        return Plan(block_m, block_n, cores)
    for kept in () if shape.flat else cost.kept:
        tile = block_m * block_n
        left = ub_bytes * UB_SHARE - tile * max(map(kept.row.get, itemsizes))
        piece = piece_elements(max(map(kept.piece.get, itemsizes)), left, tile)
        if piece >= max(block_n, MIN_PIECE):
            return Plan(min(MAX_BLOCK_M, piece // block_n), block_n, cores, tile, 1)
    # The kernels of group_pieces, whose tile is of channels and positions even if there is one
    # position only. A tile of several channels counts twice, much as with SEVERAL_ROWS.
    elements = tile_elements(max(map(cost.wide.get, itemsizes)), ub_bytes)
    block_n = max(MIN_BLOCK_N, next_power_of_2(shape.S))
    if block_n > elements:
        return Plan(1, chunk_width(shape.S, elements), cores)
    rows = min(MAX_BLOCK_M, next_power_of_2(shape.C_G), max(1, elements // 2 // block_n))
    return Plan(rows, block_n, cores)


def chunk_width(N: int, elements: int) -> int:
    """Return the chunk width, `elements`, a half or a quarter of it, that pads N the least.

    Of widths that pad N by at most a sixteenth, the widest is returned: it takes the fewest turns.
    """
    widths = [max(MIN_BLOCK_N, elements >> shift) for shift in range(3)]
    padding = {width: cdiv(N, width) * width - N for width in widths}
    return min(widths, key=lambda width: (max(padding[width], N // 16), -width))


def tile_elements(cost: float, ub_bytes: int) -> int:
    """Return the largest power of two of elements that fits the buffer at `cost` bytes each."""
    return max(MIN_BLOCK_N, 1 << (int(ub_bytes * UB_SHARE / cost).bit_length() - 1))


def ub_bytes() -> int:
    """Return the bytes of a vector core's Unified Buffer; LIGER_OPS_NPU_UB_BYTES overrides it."""
    override = os.environ.get("LIGER_OPS_NPU_UB_BYTES")
    if override:
        return int(override)
    return INTERPRETED_UB_BYTES if _interpreted() else _device_ub_bytes()


def vector_cores() -> int:
    """Return the number of vector cores of the device, the largest useful number of programs.

    LIGER_OPS_NPU_VECTOR_CORES overrides it.
    """
    override = os.environ.get("LIGER_OPS_NPU_VECTOR_CORES")
    if override:
        cores = int(override)
    else:
        cores = INTERPRETED_VECTOR_CORES if _interpreted() else _device_vector_cores()
    return min(cores, MAX_PROGRAMS)


def rows(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as contiguous (M, N).

    A tensor of two dimensions is not reshaped: if it has no columns, -1 would be ambiguous.
    """
    if tensor is None or tensor.dim() == 2:
        return contiguous(tensor)
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _device_vector_cores() -> int:
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return properties["num_vectorcore"]


@functools.cache
def _device_ub_bytes() -> int:
    # triton-ascend's driver gives the chip, and CANN's platform tables its buffer.
    from tbe.common.platform import get_soc_spec, set_current_compile_soc_info

    set_current_compile_soc_info(driver.active.get_current_target().arch)
    return int(get_soc_spec("UB_SIZE"))


def launch(kernel: Any, plan: Plan, tiles: int, x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel over the tiles on the NPU that holds x, which need not be the current one."""
    grid = (plan.programs(tiles),)
    tile = {"BLOCK_M": plan.BLOCK_M, "BLOCK_N": plan.BLOCK_N}
    if x.device.type == "npu" and x.device.index not in (None, torch.npu.current_device()):
        with torch.npu.device(x.device):
            kernel[grid](x, *args, **constants, **tile)
    else:
        kernel[grid](x, *args, **constants, **tile)


def launch_rows(
    kernels: tuple[Any, Any], plan: Plan, x: Tensor, *args: Any, **constants: Any
) -> None:
    """Launch kernels[0] if the rows of x, (M, N), fit the tile, else kernels[1]."""
    M, N = x.shape
    whole = plan.whole(N)
    kept = {} if whole else {"ROW": plan.ROW, "KEPT": plan.KEPT}
    kernel = kernels[0] if whole else kernels[1]
    launch(kernel, plan, cdiv(M, plan.BLOCK_M), x, *args, **constants, **kept)
