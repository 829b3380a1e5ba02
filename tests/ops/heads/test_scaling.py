"""The gradients of a head that a forward computed, times a factor: by a device's kernel where
nothing is traced."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops.lowering.cuda.heads.heads import scale
from liger_ops.ops.heads import head
from op_under_test import DEVICE

pytestmark = pytest.mark.device_kernels

ROWS = 37


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Calls(list[Tensor]):
    def __call__(self, gradient: Tensor, factor: Tensor, result: Tensor) -> None:
        self.append(gradient)
        scale(gradient, factor, result)


def gradient_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, 130, device=DEVICE).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.float16)],
)
def test_the_kernel_rounds_once(dtype: torch.dtype, result: torch.dtype, rows: int) -> None:
    gradient, factor = gradient_of(dtype), torch.rand(rows, 1, device=DEVICE)
    expected = (gradient.float() * factor).to(result)
    with patch.dict(head.scales, {DEVICE: Calls()}) as scales:
        assert torch.equal(head.scaled(gradient, factor, result), expected)
        if dtype is result:
            assert head.scale_(gradient, factor) is gradient
            assert torch.equal(gradient, expected)
        assert len(scales[DEVICE]) == 1 + (dtype is result)


def test_the_kernel_is_not_called_where_it_would_be_wrong() -> None:
    calls = Calls()
    with patch.dict(head.scales, {DEVICE: calls}):
        gradient, factor = gradient_of(torch.bfloat16), torch.rand(1, 1, device=DEVICE)
        expected = (gradient.float() * factor).bfloat16()
        # Autograd would not see it, or a mode, or a transform.
        assert torch.equal(head.scaled(gradient, factor, torch.bfloat16), expected)
        with torch.no_grad(), Mode():
            assert torch.equal(head.scaled(gradient, factor, torch.bfloat16), expected)
        with torch.no_grad():
            batched = torch.vmap(lambda row: head.scaled(row, factor[0], torch.bfloat16))
            assert torch.equal(batched(gradient), expected)
            # Rows that are not adjacent.
            apart = gradient_of(torch.bfloat16).t()
            expected = (apart.float() * factor).bfloat16()
            assert torch.equal(head.scale_(apart, factor), expected)
            if DEVICE != "npu":
                wide = gradient.double()
                assert torch.equal(head.scaled(wide, factor, wide.dtype), wide * factor)
    assert not calls
