"""log_softmax against float64 truth, and against torch.nn.functional.log_softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import liger_ops
import op_checks
import strategies
from op_table import OPS
from op_under_test import DEVICE, FOLDERS, Case

OP = OPS["log_softmax"]
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.softmaxes())
def test_forward_matches_truth(folder: str, case: Case) -> None:
    op_checks.assert_forward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.softmaxes())
def test_backward_matches_truth(folder: str, case: Case) -> None:
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.softmaxes().filter(strategies.has_rows))
def test_properties(folder: str, case: Case) -> None:
    op_checks.assert_deterministic(OP, folder, case)
    op_checks.assert_tile_does_not_matter(OP, folder, case)
    op_checks.assert_rows_are_independent(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("columns", (4096, 32000, 65536, 128256, 200003))
def test_wide_rows_by_the_host_codes_own_plan(folder: str, columns: int) -> None:
    case = Case(shape=(3, columns), dtype=torch.bfloat16, layout="sliced")
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 64), (2, 16), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """As PyTorch: elements of -inf have probability 0, at the start of a row, at its end, and all
    but one; rows of -inf alone, with inf and with NaN are NaN. The lowest number is a number."""
    inf = torch.inf
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -inf
    x[4, 5] = inf
    x[5, 39] = torch.nan
    x[6, :] = torch.finfo(dtype).min
    x[7, :39] = torch.finfo(dtype).min
    forward_case = Case(shape=(9, 40), dtype=dtype, tile=tile)
    (y,) = op_checks.run_kernel(OP, folder, False, forward_case, (x,))
    expected = torch.nn.functional.log_softmax(x, -1)
    assert y is not None
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y.isnan().all(-1).tolist() == [row in (3, 4, 5) for row in range(9)]
    dy = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    (dx,) = op_checks.run_kernel(OP, folder, True, forward_case, (dy, expected))
    torch.testing.assert_close(
        dx, torch.ops.aten._log_softmax_backward_data(dy, expected, -1, dtype), equal_nan=True
    )


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((), (3,), (2, 3), (0,)))
def test_agrees_with_aten(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(*shape, 33)).to(dtype).requires_grad_()
    dy = torch.randn(*shape, 33).to(dtype)
    # On a CPU, ATen's log_softmax of half precision rounds on the way, unless it widens first.
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    ours, theirs = (
        liger_ops.log_softmax(x),
        torch.nn.functional.log_softmax(x, -1, dtype=wide).to(dtype),
    )
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, theirs)
    (ours_dx,), (theirs_dx,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    # Ours starts from the rounded y, as ATen's own does.
    bounds = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(ours_dx, theirs_dx, **bounds)


@pytest.mark.parametrize("dim", (-1, 2, 0, -2))
def test_module_is_torchs(dim: int) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = liger_ops.nn.LogSoftmax(dim), torch.nn.LogSoftmax(dim)
    assert isinstance(ours, torch.nn.LogSoftmax)
    assert repr(ours) == repr(theirs)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_rejects() -> None:
    op_checks.assert_rejects(
        OP, (torch.tensor(1.0),), "log_softmax: x must be (..., N), got shape ()"
    )
    with pytest.raises(TypeError, match="LogSoftmax: dim must be an int, got str"):
        liger_ops.nn.LogSoftmax("last")
    with pytest.raises(
        ValueError, match="LogSoftmax: dim must be one of input's 2 dimensions, got 2"
    ):
        liger_ops.nn.LogSoftmax(2)(torch.zeros(2, 3))
