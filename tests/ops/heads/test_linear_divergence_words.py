"""linear_divergence's backward by chunks of words, and the tokens that are selected before it."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from head_calls import Calls
from liger_ops import library
from linear_divergence_cases import OPS, TwoHeadsCase, tensors
from op_under_test import EVERY_FOLDER, max_abs

BACKWARD = library.OPS["linear_divergence_backward"]


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("by_logits", (False, True))
def test_rows_of_the_weights_gradient_are_rounded_once(folder: str, by_logits: bool) -> None:
    """No tensor is larger than that gradient in its own dtype, and its rows do not depend on the
    number of chunks of words but by how products of two sizes round."""
    V, D = 512, 64
    found = []
    for chunk_bytes in (8 * 64 * 4, None):
        case = TwoHeadsCase(
            shape=(8,), V=V, W=384, D=D, dtype=torch.bfloat16, reduction="none", bias=False,
            by_logits=by_logits, kind="tvd", hard_weight=0.5, chunk_bytes=chunk_bytes,
            mask=(True, True, False),
        )  # fmt: skip
        args = OPS[0].backward_args(case, tensors(case))
        with Calls() as calls:
            dx, dweight, *_ = BACKWARD.kernels[folder](*args)
        found.append((dx, dweight))
        assert calls.largest == V * D * 2
    for few, one in zip(*found, strict=True):
        torch.testing.assert_close(few, one, rtol=2**-7, atol=2**-8 * max_abs(one))


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_frozen_weight_has_chunks_of_tokens(folder: str) -> None:
    """The gradient of x has no sum in float32."""
    case = TwoHeadsCase(
        shape=(32,), V=16, W=16, D=128, E=4, dtype=torch.bfloat16, reduction="none", bias=False,
        chunk_bytes=8 * 16 * 4, mask=(True, False, False),
    )  # fmt: skip
    args = OPS[0].backward_args(case, tensors(case))
    with Calls() as calls:
        dx, *others = BACKWARD.kernels[folder](*args)
    assert dx is not None and others == [None] * 4
    assert calls.largest == 32 * 128 * 2


def test_tokens_that_are_selected_before() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    teacher, target = torch.randn(6, 7), torch.tensor([0, -100, 3, -100, -100, 1])
    counts = target != -100
    results = []
    for kept in (slice(None), counts):
        given = {"teacher_logits": teacher[kept], "target": target[kept], "hard_weight": 0.5}
        loss, *_ = liger_ops.linear_divergence(x[kept], weight, **given, kind="tvd")
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    torch.testing.assert_close(*results)
