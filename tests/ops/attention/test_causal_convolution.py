"""The kernels of multi_token_attention's convolution against PyTorch's, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_ops.lowering.common.attention.multi_token_attention import CausalConvolution
from liger_ops.lowering.cuda.attention import multi_token_attention as cuda
from op_under_test import DEVICE, Values

pytestmark = pytest.mark.device_kernels


def difference(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).abs().max() / truth.abs().max()).item()


@pytest.mark.parametrize(
    ("channels", "out", "groups", "kernel", "padding", "dilation"),
    (
        (2, 3, 1, (3, 3), (1, 1), (1, 1)),
        # Tiles of 32 and of 64 channels.
        (4, 34, 2, (2, 4), (1, 2), (1, 1)),
        (2, 33, 1, (3, 1), (2, 0), (2, 5)),
        # A padding larger than the kernel, and a result smaller than scores.
        (2, 2, 2, (1, 1), (2, 2), (1, 1)),
        (2, 2, 1, (3, 3), (0, 0), (3, 3)),
    ),
)
def test_is_the_convolution_where_the_key_is_not_after_the_query(
    channels: int, out: int, groups: int, kernel: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With several tiles of keys, some inside, some at an edge, and some after all queries."""
    for plans in (cuda.FORWARD, cuda.WEIGHTS):
        for size in plans:
            monkeypatch.setitem(plans, size, cuda.ConvolutionPlan(16, size, 16, 1))
    values, L = Values(0), 37
    dtype = torch.float16 if out == 3 else torch.bfloat16
    p = values.draw((2 if out < 33 else 1, channels, L, L), dtype).tril()
    weight = values.draw((out, channels // groups, *kernel), dtype)
    bias = values.draw((out,), dtype)
    options = ([1, 1], list(padding), list(dilation), groups)
    kernels, truth = cuda.KernelConvolution(*options), CausalConvolution(*options)
    assert kernels.takes(weight)
    wide = [tensor.double() for tensor in (p, weight, bias)]
    y, expected = kernels.forward(p, weight, bias), truth.forward(*wide)
    eps = torch.finfo(dtype).eps
    assert y.dtype is dtype and y.shape == expected.shape
    assert difference(y, expected) < eps and (y.triu(1) == 0).all()
    # What is masked is not read.
    dy = values.draw(expected.shape, dtype)
    future = torch.ones(dy.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
    unread = kernels.masked(dy.masked_fill(future, torch.nan), weight)
    dc = truth.masked(dy.double(), wide[1])
    dp, expected = (
        kernels.gradient_of_input(unread, weight, L),
        truth.gradient_of_input(dc, wide[1], L),
    )
    assert dp.dtype is dtype and difference(dp.tril(), expected.tril()) < eps
    gradients = kernels.gradients_of_weights(unread, p, weight, True)
    for result, wanted in zip(
        gradients, truth.gradients_of_weights(dc, wide[0], wide[1], True), strict=True
    ):
        assert result is not None and wanted is not None
        assert result.dtype is torch.float32 and difference(result, wanted) < 1e-5


def test_what_is_left_to_pytorch() -> None:
    def takes(
        out: int, channels: int, dtype: torch.dtype = torch.bfloat16, stride: int = 1
    ) -> bool:
        weight = torch.empty(out, channels, 3, 3, dtype=dtype)
        return cuda.KernelConvolution([stride] * 2, [1, 1], [1, 1], 1).takes(weight)

    assert takes(64, 64)
    assert not takes(65, 64) and not takes(64, 65)
    assert not takes(4, 4, torch.float32) and not takes(4, 4, stride=2)
