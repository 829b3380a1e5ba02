"""Plans with the tile of a case, of the type that each device's op takes."""

from __future__ import annotations

import math
from typing import Any

from liger_ops.lowering.common.tensors import next_power_of_2
from op_under_test import Case, OpUnderTest


def plan(folder: str, op: OpUnderTest, case: Case, backward: bool = False) -> Any:
    """Return a plan for few programs with the case's tile, or None for the host code's choice."""
    if case.tile is None:
        return None
    rows, columns = case.tile
    if op.name == "neighborhood_attention_forward":
        return plan_of_windows(folder, case, rows, columns)
    if op.name == "rms_norm_rope":
        return plan_of_heads(folder, case, rows, columns)
    if folder == "npu":
        from liger_ops.lowering.npu.tiling import Plan

        if op.name == "group_norm":
            C_G, S = case.shape[1] // case.num_groups, math.prod(case.shape[2:])
            # The size and the seed decide whether the group is kept or read twice: both are drawn.
            if rows < C_G and columns >= S and (C_G + case.seed) % 2:
                return Plan(rows, columns, 2, ROW=next_power_of_2(C_G) * columns, KEPT=1)
            return Plan(rows, columns, cores=2)
        if rows > 1 or columns >= case.shape[-1]:
            return Plan(rows, columns, cores=2)
        # The size and the seed decide the level, from nothing kept to the most: all are drawn.
        kept = (sum(case.shape) + case.seed) % 4
        return Plan(rows, columns, cores=2, ROW=next_power_of_2(case.shape[-1]), KEPT=kept)
    if op.name == "group_norm":
        return plan_of_groups(case, rows, columns)
    if op.name == "rope":
        from liger_ops.lowering.cuda.rope.rope import RopePlan

        return RopePlan(rows, 2, columns)
    return plan_of_rows(op.name, rows, columns, case.shape[-1], backward)


def plan_of_windows(folder: str, case: Case, rows: int, columns: int) -> Any:
    if folder == "npu":
        from liger_ops.lowering.npu.tiling import Plan

        return Plan(rows * columns, next_power_of_2(max(16, case.shape[-1])), cores=2)
    from liger_ops.lowering.cuda.attention.neighborhood_attention import NeighborhoodTiles

    return NeighborhoodTiles(rows, columns)


def plan_of_heads(folder: str, case: Case, rows: int, columns: int) -> Any:
    """Return a plan of whole heads: of `rows` positions, or on cuda of a number of heads."""
    if folder == "npu":
        from liger_ops.lowering.npu.tiling import Plan

        return Plan(rows, next_power_of_2(max(16, case.rotary // 2)), cores=2)
    from liger_ops.lowering.cuda.rope.rms_norm_rope import HeadsPlan

    return HeadsPlan(rows * max(1, columns // 8), programs=2, num_stages=rows)


def plan_of_groups(case: Case, rows: int, columns: int) -> Any:
    from liger_ops.lowering.cuda.norms.group.group_cached import Walk
    from liger_ops.lowering.cuda.norms.group.group_norm import WholeGroup
    from liger_ops.lowering.cuda.norms.group.group_pieces import Pieces

    C_G, S = case.shape[1] // case.num_groups, math.prod(case.shape[2:])
    if rows > 2:
        return Pieces(rows, columns, ahead=2)
    # A tile has all channels of the group; `rows` is the number of tiles that a program keeps.
    channels = next_power_of_2(C_G)
    if columns >= S:
        return WholeGroup(channels, columns)
    return Walk(channels, columns, unroll=2, kept=rows)


def plan_of_rows(op: str, rows: int, columns: int, width: int, backward: bool) -> Any:
    """Return the plan of a cuda op whose tiles have rows and columns."""
    from liger_ops.lowering.cuda.launch import Tile, TwoPass, WholeRow
    from liger_ops.lowering.cuda.losses import cross_entropy
    from liger_ops.lowering.cuda.norms.norm_backward_two_kernel import TwoKernel
    from liger_ops.lowering.cuda.norms.norm_backward_two_pass import TwoPassBackward

    loss = op in ("cross_entropy_forward", "log_prob_forward", "divergence_forward")
    if loss and backward:
        return cross_entropy.SplitRows(columns, BLOCK_M=rows, programs=2)
    if not loss and "norm" not in op and "max" not in op:
        return Tile(columns, BLOCK_M=rows)
    if columns >= width:
        return WholeRow(columns, BLOCK_M=rows, programs=2)
    if loss:
        return cross_entropy.Online(columns)
    if "norm" in op and op != "poly_norm" and backward:
        two_pass = TwoPassBackward(columns, programs=2)
        if rows == 1 and op != "gated_rms_norm":
            return two_pass
        return TwoKernel(columns, programs=2, BLOCK_M=rows)
    return TwoPass(columns)
