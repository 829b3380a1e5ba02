"""cross_entropy of infinities, NaN, huge logits, and targets out of range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, INF, NAN

OP = OPS["cross_entropy_forward-mean"]


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 64), (2, 16), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities_and_nan(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """Same results as PyTorch: classes of -inf have probability 0, at the start or the end of a
    row, or all but one. A row of only -inf, or with inf or NaN, gives NaN for its own token, unless
    that is ignored."""
    x = torch.randn(10, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -INF
    x[4, 5] = INF
    x[5, 39] = x[8] = NAN
    x[6, 5:] = torch.finfo(dtype).min
    target = torch.tensor([39, 0, 0, 1, 2, 3, 4, 20, -100, -100], device=DEVICE)
    case = OP.case(shape=(10, 40), dtype=dtype, tile=tile, reduction="none")
    options = (None, None, None, *OP.options(case))
    outputs = op_checks.run_kernel(OP, folder, False, case, (x, target, *options, False, False))
    loss, _, lse, _, total_weight, _, _, error = outputs
    reference = x.float().requires_grad_()
    expected = F.cross_entropy(reference, target, reduction="none")
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    assert loss.isnan().tolist() == [row in (3, 4, 5) for row in range(10)]
    assert lse[3] == -INF and total_weight == 8
    dloss = torch.randn(10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    args = (dloss, None, None, None, x, target, None, None, None, lse, error, total_weight)
    (dx,) = op_checks.run_kernel(OP, folder, True, case, (*args, *OP.options(case)))
    (expected,) = torch.autograd.grad(expected, reference, dloss)
    bad = [3, 4, 5]
    assert dx[bad].isnan().all() and bool((dx[[8, 9]] == 0).all())
    good = [0, 1, 2, 6, 7]
    torch.testing.assert_close(dx[good], expected[good].to(dtype))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 16)))
def test_softcap_of_huge_logits(folder: str, tile: tuple[int, int] | None) -> None:
    """The cap holds even if the logits exceed float32's range, and the slope is then 0."""
    x = torch.tensor([[3e38, -3e38, 1e4, -1e4, INF, -INF, 0.0, 1.0]] * 2, device=DEVICE)
    target = torch.tensor([0, 6], device=DEVICE)
    case = OP.case(shape=(2, 8), dtype=x.dtype, tile=tile, softcap=20.0, reduction="none")
    args = (x, target, None, None, None, *OP.options(case))
    loss, _, lse, target_logit, total_weight, *_, error = op_checks.run_kernel(
        OP, folder, False, case, (*args, False, False)
    )
    capped = (20 * torch.tanh(x.double() / 20)).requires_grad_()
    float32 = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(lse.double(), capped.logsumexp(-1), **float32)
    torch.testing.assert_close(target_logit, torch.tensor([20.0, 0.0], device=DEVICE))
    expected = F.cross_entropy(capped, target, reduction="none")
    torch.testing.assert_close(loss.double(), expected, **float32)
    upstream = (torch.ones(2, device=DEVICE), None, None, None)
    (dx,) = op_checks.run_kernel(
        OP, folder, True, case, (*upstream, *args[:5], lse, error, total_weight, *OP.options(case))
    )
    (dcapped,) = torch.autograd.grad(expected.sum(), capped)
    slope = 1 - torch.tanh(x.double() / 20).square()
    torch.testing.assert_close(dx.double(), dcapped * slope, rtol=1e-5, atol=1e-7)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 16)))
@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1))
def test_a_target_out_of_range_is_loud(
    folder: str, wrong: int, tile: tuple[int, int] | None
) -> None:
    """The loss is NaN where no assertion stops the kernel, as in the interpreter."""
    if DEVICE == "cuda":
        pytest.skip("a device-side assertion ends the process's use of the GPU")
    case = OP.case(shape=(3, 33), dtype=torch.float32, tile=tile, reduction="none")
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    target = torch.tensor([1, wrong, -100], device=DEVICE)
    args = (x, target, torch.ones(33, device=DEVICE), None, None, *OP.options(case), False, False)
    loss, *_ = op_checks.run_kernel(OP, folder, False, case, args)
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("wrong", (-1, 33, 2**40))
def test_the_gpus_assertion(monkeypatch: pytest.MonkeyPatch, wrong: int, reduction: str) -> None:
    """The assertion that `debug` compiles in fails for targets out of range, and for no others."""
    builder = interpreter.interpreter_builder
    debug = replace(builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", debug)
    kernel = OP.kernel("cuda")
    kernel(torch.zeros(2, 33), torch.tensor([32, -100]), reduction=reduction)
    with pytest.raises(Exception, match="a target is neither ignore_index nor from 0 to V - 1"):
        kernel(torch.zeros(3, 33), torch.tensor([1, wrong, -100]), reduction=reduction)


@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_a_target_out_of_range_is_an_index_error(wrong: int, dtype: torch.dtype) -> None:
    target = torch.tensor([1, wrong, -100], dtype=dtype)
    with pytest.raises(IndexError, match="cross_entropy: target must be .*-100, or from 0 to 32"):
        liger_ops.cross_entropy(torch.zeros(3, 33), target, torch.ones(33))
