"""Kernels read every input and write every output once; rows that do not fit are read twice.

`make test-npu` holds every npu kernel to that, when it counts their traffic for npu.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch_cases import counted
from traffic import Traffic, excess, traffic

CASES = {f"{few.op.id} {few.label}": few for _, few in counted()}
# An elementwise kernel has one plan for all rows, and the forms of cross_entropy read the same.
OF_CUDA = [
    label
    for label, few in CASES.items()
    if not (few.op.elementwise and 100 < few.case.shape[-1] < 131072)
    and few.op.id != "cross_entropy_forward-none"
]


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("label", OF_CUDA)
def test_cuda_kernels_move_the_least(label, backward):
    few = CASES[label]
    # No plan changes above so many columns.
    shape = tuple(min(size, 65537) for size in few.case.shape)
    case = replace(few, case=replace(few.case, shape=shape))
    assert not excess(case, "cuda", backward, traffic(case.op, "cuda", backward, case.case))


OF_ROWS = ("rms_norm", "fused_add_rms_norm", "layer_norm", "softmax", "log_softmax")
DTYPES = (torch.bfloat16, torch.float32)
KEPT = [
    label
    for label, few in CASES.items()
    if few.op.name in OF_ROWS and 4096 < few.case.shape[-1] <= 16384
]


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label", KEPT)
def test_npu_kernels_keep_their_rows(label, dtype, backward):
    """Rows of bfloat16, and of float32 that take as many bytes."""
    few = CASES[label]
    rows, columns = few.case.shape
    shape = (rows, columns * 2 // dtype.itemsize)
    case = replace(few, case=replace(few.case, dtype=dtype, shape=shape))
    assert not excess(case, "npu", backward, traffic(case.op, "npu", backward, case.case))


@pytest.mark.parametrize("folder", ("cuda", "npu"))
def test_too_much_and_too_little_are_named(folder):
    case = next(case for case in CASES.values() if case.op.name == "rms_norm")
    for moved in (150, 290):
        found = Traffic(moved, inputs=100, outputs=100, other=0)
        assert excess(case, folder, False, found).startswith(f"{folder} rms_norm bf16 ")
    assert not excess(case, folder, False, Traffic(200, inputs=100, outputs=100, other=0))
