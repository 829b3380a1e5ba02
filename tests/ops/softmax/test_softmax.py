"""softmax and log_softmax of infinities, and their modules."""

from __future__ import annotations

import pytest
import torch

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

BOTH = pytest.mark.parametrize("name", ("softmax", "log_softmax"))
MODULES = pytest.mark.parametrize("name", ("Softmax", "LogSoftmax"))


@pytest.mark.device_kernels
@BOTH
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 64), (2, 16), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities(
    name: str, folder: str, tile: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    """Same results as PyTorch. Elements of -inf have probability 0: at the start or the end of a
    row, or all but one. Rows of only -inf, or with inf or NaN, are NaN. The lowest finite number is
    an ordinary value."""
    op, inf = OPS[name], torch.inf
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -inf
    x[4, 5] = inf
    x[5, 39] = torch.nan
    x[6, :] = torch.finfo(dtype).min
    x[7, :39] = torch.finfo(dtype).min
    case = op.case(shape=(9, 40), dtype=dtype, tile=tile)
    (y,) = op_checks.run_kernel(op, folder, False, case, (x,))
    expected = getattr(torch, name)(x, -1)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y.isnan().all(-1).nonzero().flatten().tolist() == [3, 4, 5]
    dy = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    (dx,) = op_checks.run_kernel(op, folder, True, case, (dy, expected))
    backward = getattr(torch.ops.aten, f"_{name}_backward_data")
    torch.testing.assert_close(dx, backward(dy, expected, -1, dtype), equal_nan=True)


@MODULES
@pytest.mark.parametrize("dim", (-1, 2, 0, -2))
def test_module_is_torchs(name: str, dim: int) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module, expected = (getattr(nn, name)(dim) for nn in (liger_ops.nn, torch.nn))
    assert isinstance(module, type(expected)) and repr(module) == repr(expected)
    torch.testing.assert_close(module(x), expected(x), rtol=1e-12, atol=1e-12)


@MODULES
def test_dimensions_that_a_module_refuses(name: str) -> None:
    module = getattr(liger_ops.nn, name)
    with pytest.raises(TypeError, match=f"^{name}: dim must be an int, got str"):
        module("last")
    refused = f"^{name}: dim must be one of input's 2 dimensions, got 2"
    with pytest.raises(ValueError, match=refused):
        module(2)(torch.zeros(2, 3))
