"""poly_norm of large elements, and the first values of its module."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["poly_norm"]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_half_precision_does_not_overflow(folder: str) -> None:
    """Elements from 41 on, whose cube float16 cannot hold."""
    x = torch.full((2, 16), 300.0, dtype=torch.float16, device=DEVICE)
    weight = x.new_tensor((1.0, 2.0, 4.0))
    assert torch.equal(OP.kernel(folder)(x, weight), torch.full_like(x, 7.0))


def test_the_module_starts_as_the_authors() -> None:
    state = liger_ops.nn.PolyNorm().state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {
        "weight": pytest.approx([1 / 3] * 3), "bias": [0.0],
    }  # fmt: skip
