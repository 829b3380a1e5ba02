"""The tile that a case asks for, as each device's folder names it."""

from __future__ import annotations

from typing import Any

from liger_ops.lowering.sizes import next_power_of_2
from op_under_test import Case, OpUnderTest


def plan(folder: str, op: OpUnderTest, case: Case) -> Any:
    """A plan of few programs with the case's tile, or None for the host code's own choice."""
    if case.tile is None:
        return None
    rows, columns = case.tile
    if folder == "npu":
        from liger_ops.lowering.npu.tiling import Plan

        return Plan(rows, columns, cores=2)
    if op.name == "group_norm":
        from liger_ops.lowering.cuda.group_plan import GroupPlan

        # A program to a group has all its channels in a tile: rows are how many tiles it keeps.
        if rows > 2:
            return GroupPlan(rows, columns, threads=128, ahead=2)
        channels = next_power_of_2(case.shape[1] // case.num_groups)
        return GroupPlan(channels, columns, threads=128, unroll=2, kept=rows)
    if op.name == "rope":
        from liger_ops.lowering.cuda.rope import RopePlan

        return RopePlan(rows, 2, columns)
    from liger_ops.lowering.cuda.launch import Plan

    return Plan(rows, columns, threads=128, programs=2)
