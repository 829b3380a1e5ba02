"""Tests and checks that the activations share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def assert_model_may_be_replaced(
    theirs: Callable[[], Tensor], ours: Callable[[], Tensor], model: nn.Module
) -> None:
    """The results and the gradients of the model's parameters agree within the dtype's rounding.

    Model code rounds after every operation, so its error is the larger one.
    """
    expected, found = theirs(), ours()
    assert found.dtype is expected.dtype
    # Rounding errors of terms that cancel in the surrounding products have this size.
    dtype = expected.dtype
    bounds = {} if dtype is torch.float32 else {"rtol": 4 * torch.finfo(dtype).eps}
    parameters = list(model.parameters())
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    pairs = [(found, expected)] + [
        (a, b)
        for a, b in zip(
            torch.autograd.grad(found, parameters, dy, allow_unused=True),
            torch.autograd.grad(expected, parameters, dy, allow_unused=True),
            strict=True,
        )
        if a is not None or b is not None
    ]
    for a, b in pairs:
        if bounds:
            bounds["atol"] = bounds["rtol"] * float(b.abs().max())
        torch.testing.assert_close(a, b, **bounds)
