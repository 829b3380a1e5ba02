"""Tests that softmax and log_softmax share. Each function except assert_rejects makes one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import op_checks
from op_under_test import DEVICE, EVERY_FOLDER, OpUnderTest

Test = Callable[..., None]


def infinities(
    op: OpUnderTest,
    theirs: Callable[[Tensor, int], Tensor],
    theirs_backward: Callable[[Tensor, Tensor, int, torch.dtype], Tensor],
) -> Test:
    @pytest.mark.device_kernels
    @EVERY_FOLDER
    @pytest.mark.parametrize("tile", (None, (2, 64), (2, 16), (1, 16)))
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_infinities(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
        """Same results as PyTorch. Elements of -inf have probability 0: at the start or the end of
        a row, or all but one. Rows of only -inf, or with inf or NaN, are NaN. The lowest finite
        number is an ordinary value."""
        inf = torch.inf
        x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -inf
        x[4, 5] = inf
        x[5, 39] = torch.nan
        x[6, :] = torch.finfo(dtype).min
        x[7, :39] = torch.finfo(dtype).min
        case = op.case(shape=(9, 40), dtype=dtype, tile=tile)
        (y,) = op_checks.run_kernel(op, folder, False, case, (x,))
        expected = theirs(x, -1)
        assert y is not None, op.id
        torch.testing.assert_close(y, expected, equal_nan=True)
        nan_rows = y.isnan().all(-1).nonzero().flatten().tolist()
        assert nan_rows == [3, 4, 5], f"{op.id}: the rows of NaN alone are {nan_rows}"
        dy = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        (dx,) = op_checks.run_kernel(op, folder, True, case, (dy, expected))
        torch.testing.assert_close(dx, theirs_backward(dy, expected, -1, dtype), equal_nan=True)

    return test_infinities


def agrees_with_aten(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> Test:
    @pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    @pytest.mark.parametrize("shape", ((), (3,), (2, 3), (0,)))
    def test_agrees_with_aten(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        x = (4 * torch.randn(*shape, 33)).to(dtype).requires_grad_()
        dy = torch.randn(*shape, 33).to(dtype)
        y, expected = ours(x), theirs(x)
        assert y.dtype is dtype, f"{y.dtype} is not {dtype}"
        torch.testing.assert_close(y, expected)
        (dx,), (expected_dx,) = (torch.autograd.grad(output, x, dy) for output in (y, expected))
        # ATen rounds inside softmax's half-precision backward. log_softmax's backward starts from
        # the rounded y, as ATen's does.
        bounds = {} if dtype.itemsize > 2 else {"rtol": 0.02, "atol": 16 * torch.finfo(dtype).eps}
        torch.testing.assert_close(dx, expected_dx, **bounds)

    return test_agrees_with_aten


def module_is_torchs(ours: type[nn.Module], theirs: type[nn.Module]) -> Test:
    @pytest.mark.parametrize("dim", (-1, 2, 0, -2))
    def test_module_is_torchs(dim: int) -> None:
        x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        module, expected = ours(dim), theirs(dim)
        assert isinstance(module, theirs), f"{module} is not torch's"
        assert repr(module) == repr(expected), f"{module} does not read {expected}"
        torch.testing.assert_close(module(x), expected(x), rtol=1e-12, atol=1e-12)

    return test_module_is_torchs


def assert_rejects(module: type[nn.Module], name: str) -> None:
    """Check the dimensions that the module `name` does not accept."""
    with pytest.raises(TypeError, match=f"^{name}: dim must be an int, got str"):
        module("last")
    with pytest.raises(
        ValueError, match=f"^{name}: dim must be one of input's 2 dimensions, got 2"
    ):
        module(2)(torch.zeros(2, 3))
