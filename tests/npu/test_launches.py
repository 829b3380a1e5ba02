"""A case of the table launches every kernel, and every launch has a grid that a device takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import liger_ops.lowering.npu as npu
from launch_cases import PICKED
from launches import calls, npu_ops
from op_table import OPS
from toolchain import VECTOR_CORES

# CANN's runtime takes names of 49 characters.
LONGEST_NAME = 49

of_all_ops = pytest.mark.skipif(bool(PICKED), reason="OPS picks some ops")


@of_all_ops
def test_every_op_has_launches():
    by_pytorch = {op.name for op in OPS.values() if op.is_pytorchs_forward}
    # Ops without shapes launch the kernels of other ops.
    by_others = {
        n for op in OPS.values() if not op.forms.shapes for n in (op.name, op.backward_name)
    }
    launching = {call.op for call in calls() if call.launches}
    without = set(npu_ops().values()) - launching - by_pytorch - by_others
    assert not without, f"launched by no form of an entry: {sorted(without)}"


@of_all_ops
def test_every_kernel_is_launched():
    kernels = {
        name
        for folder in npu.__path__
        for path in Path(folder).rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    without = kernels - {launch.kernel for call in calls() for launch in call.launches}
    assert not without, f"launched by no form of an entry: {sorted(without)}"
    assert all(len(name) <= LONGEST_NAME for name in kernels)


def test_every_case_launches_a_bounded_grid_of_one_dimension():
    for call in calls():
        assert call.launches, f"{call.label} launches nothing"
        for launch in call.launches:
            assert len(launch.grid) == 1 and 1 <= launch.grid[0] <= VECTOR_CORES, (
                f"{call.label}: {launch.kernel} has the grid {launch.grid}"
            )
