"""linear_cross_entropy against torch.nn.functional: all dtypes, no tokens, ignored tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from head_calls import EVERY_DTYPE, call, leaves
from linear_cross_entropy_cases import HeadCase


def unfused(args: list[Any]) -> Tensor:
    """The same computation by PyTorch, with the options that it has."""
    x, weight, target, bias, class_weight, _, _, ignore_index, reduction, smoothing = args[:10]
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(
        logits.reshape(-1, weight.shape[0]), target.reshape(-1).long(),
        None if class_weight is None else class_weight.to(logits.dtype),
        ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing,
    )  # fmt: skip
    return loss.reshape(target.shape) if reduction == "none" else loss


@EVERY_DTYPE
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("class_weight", (False, True))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.2))
def test_agrees_with_aten(
    dtype: torch.dtype, reduction: str, bias: bool, class_weight: bool, label_smoothing: float
) -> None:
    case = HeadCase(
        shape=(2, 30), V=101, dtype=dtype, bias=bias, class_weight=class_weight,
        reduction=reduction, label_smoothing=label_smoothing, chunk_bytes=7 * 101 * dtype.itemsize,
    )  # fmt: skip
    args, tensors = leaves(case)
    ours, theirs = call(args), unfused(args)
    upstream = torch.rand_like(theirs)
    bounds: dict[str, Any] = {}
    if dtype.itemsize == 2:
        bounds = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        if reduction != "mean":
            bounds["atol"] *= 8
    torch.testing.assert_close(ours, theirs, check_dtype=dtype is torch.float64)
    assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    for a, b in zip(
        torch.autograd.grad(ours, tensors, upstream),
        torch.autograd.grad(theirs, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **bounds)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@EVERY_DTYPE
@pytest.mark.parametrize("shape", ((), (1,), (0,), (2, 0), (4,)))
def test_few_tokens_and_none(shape: tuple[int, ...], dtype: torch.dtype, reduction: str) -> None:
    """As in PyTorch: without tokens, or if all are ignored, the mean is NaN, its gradient zero."""
    for ignored in ("none", "all"):
        case = HeadCase(shape=shape, dtype=dtype, reduction=reduction, ignored=ignored)
        args, tensors = leaves(replace(case, chunk_bytes=1))
        ours, theirs = call(args), unfused(args)
        torch.testing.assert_close(ours, theirs, equal_nan=True, check_dtype=False)
        upstream = torch.ones_like(ours)
        counted = ignored == "none" and args[2].numel()
        for gradient in torch.autograd.grad(ours, tensors, upstream):
            assert not gradient.isnan().any()
            assert counted or not gradient.any()


def test_ignored_tokens_have_no_gradient_beside_others() -> None:
    args, (x, _, _) = leaves(HeadCase(shape=(40,), dtype=torch.float32))
    call(args).backward()
    ignored = args[2] == -100
    assert ignored.any() and not ignored.all()
    assert not x.grad[ignored].any()
    assert x.grad[~ignored].any(-1).all()


def test_float16_neither_overflows_nor_vanishes() -> None:
    """With a loss scale and many tokens of one class, the unscaled gradient of the sum exceeds
    float16's range for weight, and the scaled mean's does not."""
    tokens, scale = 4096, 65536.0
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(tokens, 4, generator=generator)).half().requires_grad_()
    weight = (0.01 * torch.randn(8, 4, generator=generator)).half().requires_grad_()
    target = torch.zeros(tokens, dtype=torch.int64)
    for factor in (scale / 1024, 1e-4):
        loss = liger_ops.linear_cross_entropy(x, weight, target, chunk_bytes=4096)
        gradients = torch.autograd.grad(loss * factor, (x, weight))
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target) * factor, wide)
        for gradient, truth in zip(gradients, expected, strict=True):
            assert gradient.dtype is torch.float16 and gradient.isfinite().all()
            assert (gradient.double() - truth).norm() <= 2e-3 * truth.norm() + 6e-8
    total = liger_ops.linear_cross_entropy(x, weight, target, reduction="sum")
    (dweight,) = torch.autograd.grad(total / tokens, (weight,))
    assert dweight.isfinite().all() and dweight.any()
    # The sum's gradient of x exceeds float16's range, and the mean's does not.
    x, weight = torch.zeros(tokens, 1), torch.tensor([[-5e4], [5e4]])
    x, weight = x.half().requires_grad_(), weight.half()
    token_weight = torch.full((tokens,), 4.0)
    loss = liger_ops.linear_cross_entropy(x, weight, target, token_weight=token_weight)
    (dx,) = torch.autograd.grad(loss, (x,))
    torch.testing.assert_close(dx, torch.full_like(x, 5e4 / tokens))
