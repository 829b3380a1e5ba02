"""poly_norm against float64 truth, and against the code of its authors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import liger_ops
from liger_ops.bench.workloads.norms import motif_poly_norm
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["poly_norm"]


class AuthorsPolyNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return motif_poly_norm(x, self.weight, self.bias)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_module_is_the_authors(dtype: torch.dtype) -> None:
    """Same initial values, state dict, results and gradients."""
    ours, theirs = liger_ops.nn.PolyNorm(dtype=dtype), AuthorsPolyNorm().to(dtype)
    for (name, ours_), (their_name, theirs_) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == their_name
        torch.testing.assert_close(ours_, theirs_)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 33).to(dtype).requires_grad_()
    dy = torch.randn(3, 5, 33).to(dtype)
    # In bfloat16 the authors' code rounds every operation.
    bounds = {} if dtype.itemsize > 2 else {"rtol": 0.05, "atol": 0.3}
    torch.testing.assert_close(ours(x), theirs(x), **bounds)
    found, expected = (
        torch.autograd.grad(module(x), [x, *module.parameters()], dy) for module in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, **bounds)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_half_precision_does_not_overflow(folder: str) -> None:
    """Elements from 41 on, whose cube float16 cannot hold."""
    x = torch.full((2, 16), 300.0, dtype=torch.float16, device=DEVICE)
    weight = x.new_tensor((1.0, 2.0, 4.0))
    assert torch.equal(OP.kernel(folder)(x, weight), torch.full_like(x, 7.0))
