"""The errors of linear_cross_entropy, eager and traced, and their messages."""

from __future__ import annotations

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
