"""The errors of linear_cross_entropy, eager and traced, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_ops
from head_calls import call, leaves
from linear_cross_entropy_cases import HeadCase


def test_a_target_out_of_range_is_an_error() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    for wrong in (4, -1, 2**40):
        with pytest.raises(IndexError, match="target"):
            liger_ops.linear_cross_entropy(x, weight, torch.tensor([0, wrong]))


def reject(error: type[Exception], message: str, op: str = "forward", **changes: Any) -> None:
    args = {
        "x": torch.zeros(2, 3),
        "weight": torch.zeros(4, 3),
        "target": torch.zeros(2, dtype=torch.int64),
        **changes,
    }
    function = liger_ops.linear_cross_entropy
    for compiled in (False, True):
        torch._dynamo.reset()
        run = torch.compile(function, backend="eager", fullgraph=True) if compiled else function
        with pytest.raises(Exception) as caught:
            run(**args)
        assert compiled or isinstance(caught.value, error), caught.value
        # Dynamo quotes the message, and escapes quotes in it.
        assert f"linear_cross_entropy: {message}" in str(caught.value).replace("\\'", "'")


def test_rejects() -> None:
    bfloat16 = torch.bfloat16
    reject(
        TypeError,
        "weight must have x's dtype, torch.float32, got torch.bfloat16",
        weight=torch.zeros(4, 3, dtype=bfloat16),
    )
    reject(
        TypeError,
        "bias must have x's dtype, torch.float32, got torch.bfloat16",
        bias=torch.zeros(4, dtype=bfloat16),
    )
    for shape, must in (
        ((4, 2), "have the shape of (V, D) for x of (..., D), (4, 3), got (4, 2)"),
        ((3,), "be (V, D), got shape (3,)"),
        ((0, 3), "have at least one class, got (0, 3)"),
    ):
        reject(ValueError, f"weight must {must}", weight=torch.zeros(shape))
    reject(ValueError, "x must be (..., D), got shape ()", x=torch.tensor(1.0))
    reject(
        ValueError,
        "target must have the shape of x but for its last dimension, (2,), got (3,)",
        target=torch.zeros(3, dtype=torch.int64),
    )
    reject(TypeError, "target must be int64 or int32, got torch.float32", target=torch.zeros(2))
    reject(
        ValueError,
        "bias must have the shape of weight's rows, (4,), got (3,)",
        bias=torch.zeros(3),
    )
    reject(
        ValueError,
        "class_weight must have the shape of weight's rows, (4,), got (3,)",
        class_weight=torch.zeros(3),
    )
    for chunk_bytes in (0, -1):
        reject(
            ValueError,
            f"chunk_bytes must be above 0 or None, got {chunk_bytes}",
            chunk_bytes=chunk_bytes,
        )
    reject(
        ValueError,
        "accum_dtype must be torch.float32 or None, got torch.bfloat16",
        accum_dtype=bfloat16,
    )
    reject(
        ValueError,
        "reduction must be one of 'none', 'mean', 'sum', got 'average'",
        reduction="average",
    )


def test_a_gradient_that_there_is_not_is_refused() -> None:
    args, _ = leaves(HeadCase(class_weight=True, token_weight=True))
    for i, name in ((4, "class_weight"), (5, "token_weight")):
        given = list(args)
        given[i] = args[i].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"linear_cross_entropy: {name} must not require"):
            call(given)
    x, weight, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be all False for the reduction 'none'"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, reduction="none", gradient_mask=[True, False, False, False, False]
        )
    with pytest.raises(ValueError, match=r"gradient_mask\[2\] must be False without a bias"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, gradient_mask=[False, False, True, False, False]
        )
