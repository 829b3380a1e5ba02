"""Rows of every op have the same bits in every batch, within `liger_ops.invariant`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import liger_ops
from liger_ops.invariance import NotInvariantError
from op_checks import assert_rows_are_independent
from op_table import OPS
from op_under_test import DEVICE, FOLDERS, OpUnderTest


def has_products(op: OpUnderTest) -> bool:
    return op.multiplies or "linear" in op.name


# More than a block of rows of products, and on a GPU enough for every plan.
ROWS = 70 if DEVICE == "cpu" else 3000
# Of ops with products in interpreted kernels, which take long.
FEW = 5
IMPLEMENTATIONS = [
    pytest.param(op, implementation, id=f"{op.id}-{implementation}")
    for op in OPS.values()
    for implementation in (("definition", *FOLDERS) if DEVICE == "cpu" else FOLDERS)
    # The gradient of a mean is divided by the number of rows. Interpreted kernels without products
    # are tried by test_properties of test_kernels.py.
    if op.per_row
    and op.form != "mean"
    and (implementation == "definition" or DEVICE != "cpu" or has_products(op))
]


@pytest.mark.device_kernels
@pytest.mark.parametrize(("op", "implementation"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_same_bits(op: OpUnderTest, implementation: str, dtype: torch.dtype) -> None:
    interpreted = DEVICE == "cpu" and implementation != "definition"
    case = op.sample(dtype, rows=FEW if interpreted and op.multiplies else ROWS)
    if not op.rows_permute(case):
        pytest.skip("the rows of this case are not independent")
    with liger_ops.invariant():
        if op.base == "multi_token_attention":
            with pytest.raises(NotInvariantError, match="convolution"):
                assert_rows_are_independent(op, implementation, case)
            return
        assert_rows_are_independent(op, implementation, replace(case, seed=33))
