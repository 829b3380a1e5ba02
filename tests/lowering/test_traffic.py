"""Kernels read every input and write every output once; rows that do not fit are read twice.

The npu kernels are held to that by `make test-npu`, which counts their traffic for docs/npu.md.
"""

from __future__ import annotations

import pytest

from launch_cases import counted
from traffic import Traffic, excess, traffic

CASES = {f"{few.op.id} {few.label}": few for _, few in counted()}


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("label", CASES)
def test_cuda_kernels_move_the_least(label, backward):
    case = CASES[label]
    found = traffic(case.op, "cuda", backward, case.case)
    assert not excess(case, "cuda", backward, found)


@pytest.mark.parametrize("folder", ("cuda", "npu"))
def test_too_much_and_too_little_are_named(folder):
    case = next(case for case in CASES.values() if case.op.name == "rms_norm")
    for moved in (150, 290):
        found = Traffic(moved, inputs=100, outputs=100, other=0)
        assert excess(case, folder, False, found).startswith(f"{folder} rms_norm bf16 ")
    assert not excess(case, folder, False, Traffic(200, inputs=100, outputs=100, other=0))
