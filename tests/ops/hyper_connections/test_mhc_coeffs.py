"""mhc_coeffs against float64 truth, and with mhc_pre and mhc_post_res against the models' code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import liger_ops
import op_checks
from liger_ops import library
from liger_ops.lowering.common.hyper_connections import mhc_coeffs
from mhc_cases import INPUTS, RESULTS
from op_table import OPS
from op_under_test import EVERY_FOLDER, FOLDERS

OP = OPS["mhc_coeffs_forward"]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_two_runs_and_other_tiles(folder: str) -> None:
    """The rows of x, whose products PyTorch computes, are not permuted."""
    case = OP.case(shape=(9, 3, 40), dtype=BF16, tile=(4, 16))
    op_checks.assert_deterministic(OP, folder, case)
    op_checks.assert_tile_does_not_matter(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("given", range(3), ids=RESULTS)
def test_a_gradient_that_is_none_is_zero(folder: str, given: int) -> None:
    case = OP.case(shape=(5, 3, 8), dtype=FP32)
    args = OP.backward_args(case, OP.tensors(case))
    grads = args[:3]
    zeros = [grad if i == given else torch.zeros_like(grad) for i, grad in enumerate(grads)]
    nones = [grad if i == given else None for i, grad in enumerate(grads)]
    kernel = OP.kernel(folder, backward=True)
    for a, b in zip(kernel(*zeros, *args[3:]), kernel(*nones, *args[3:]), strict=True):
        assert torch.equal(a, b)
    definition = library.OPS["mhc_coeffs_backward"].definition
    for a, b in zip(definition(*zeros, *args[3:]), definition(*nones, *args[3:]), strict=True):
        assert torch.equal(a, b)


@EVERY_FOLDER
@pytest.mark.parametrize("dtype", (BF16, FP32))
def test_chunks_of_rows(folder: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of x at a time."""
    monkeypatch.setattr(mhc_coeffs, "CHUNK_BYTES", 3 * 4 * 2 * 20)
    case = OP.case(shape=(10, 2, 20), dtype=dtype)
    assert len(list(mhc_coeffs.row_chunks(torch.empty(10, 40)))) == 4
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.parametrize("dtype", (FP32, torch.float16, BF16))
def test_bfloat16_parts_add_up(dtype: torch.dtype) -> None:
    """To the last bit of a float32, from which a product by parts follows."""
    torch.manual_seed(0)
    wide = (torch.randn(40, 7) * torch.logspace(-8, 4, 40).unsqueeze(1)).to(dtype)
    parts = mhc_coeffs.bfloat16_parts(wide)
    assert parts.shape == ((40, 7) if dtype is BF16 else (40, 21))
    identity = torch.eye(40)
    sums = mhc_coeffs.summed_parts(identity @ parts.float(), 7)
    assert torch.equal(sums, wide.float())


def test_phi_in_float64_runs_the_definition() -> None:
    """Whose arithmetic is in x's dtype."""
    case = OP.case(shape=(2, 2, 4), dtype=FP32, other_dtype=torch.float64)
    args = OP.forward_args(case, OP.tensors(case))
    assert all(result.dtype is FP32 for result in OP.kernel(FOLDERS[0])(*args))


def test_rows_and_columns_sum_to_one() -> None:
    case = OP.case(shape=(20, 4, 16), dtype=FP32, tmax=50)
    h_res = liger_ops.mhc_coeffs(*OP.forward_args(case, OP.tensors(case)))[2]
    ones = torch.ones(20, 4)
    for dim in (-1, -2):
        torch.testing.assert_close(h_res.sum(dim), ones, rtol=1e-4, atol=1e-4)


def test_the_module_around_a_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, dtype=BF16)
    mhc = liger_ops.nn.MHC(layer, hc=3, hidden_size=8, tmax=5, pre_eps=0.1)
    assert set(mhc.state_dict()) == {*INPUTS[1:], "layer.weight", "layer.bias"}
    x = torch.randn(2, 5, 3, 8)
    coeffs = liger_ops.nn.MHCCoeffs(3, 8, 5, pre_eps=0.1)
    coeffs.load_state_dict({name: mhc.state_dict()[name] for name in INPUTS[1:]})
    h_pre, h_post, h_res = coeffs(x)
    x_in = liger_ops.mhc_pre(x, h_pre)
    expected = liger_ops.mhc_post_res(x, layer(x_in.to(BF16)), h_post, h_res)
    assert torch.equal(mhc(x), expected)
    mhc(x).sum().backward()
    assert all(parameter.grad is not None for parameter in mhc.parameters())
    text = "3, 8, tmax=5, rms_eps=1e-06, pre_eps=0.1, sinkhorn_eps=1e-06, post_mult=2.0"
    assert mhc.extra_repr() == text
    with pytest.raises(ValueError, match=r"MHC: x must be \(..., 3, 8\), got shape \(2, 8, 3\)"):
        mhc(torch.randn(2, 8, 3))
    with pytest.raises(ValueError, match="MHC: hc must be at least 1, got 0"):
        liger_ops.nn.MHC(layer, 0, 8)
