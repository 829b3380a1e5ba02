"""modulated_rms_norm against float64 truth, and the code of diffusion models that it replaces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import liger_ops
import modulated_blocks as blocks
import op_checks
from op_table import OPS
from op_under_test import EVERY_FOLDER

OP = OPS["modulated_rms_norm-sample"]


@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_definition_is_the_blocks_code(dtype: torch.dtype, affine: bool) -> None:
    """Bit for bit. The norm without a weight is Mochi's, and that with one Lumina's."""
    torch.manual_seed(0)
    x, scale, shift = (torch.randn(3, *size).to(dtype) for size in ((5, 64), (64,), (64,)))
    norm = blocks.RMSNorm(64, 1e-5, affine).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    y = liger_ops.modulated_rms_norm(x, scale, shift, norm.weight, 1e-5)
    assert torch.equal(y, blocks.zero(norm, x, scale, shift))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("mode", ("llama", "gemma", "float32"))
def test_kernels_round_where_the_definition_does(folder: str, mode: str) -> None:
    case = OP.case(
        shape=(2, 3, 300), dtype=torch.bfloat16, weight_dtype=torch.bfloat16,
        shift_dtype=torch.bfloat16, casting_mode=mode,
    )  # fmt: skip
    args = OP.forward_args(case, OP.tensors(case))
    (y,) = op_checks.run_kernel(OP, folder, False, case, args)
    assert (y != OP.definition(*args)).float().mean() < 0.01
