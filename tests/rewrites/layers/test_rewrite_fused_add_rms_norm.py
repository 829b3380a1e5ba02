"""fused_add_rms_norm, found in the code of models: a sum and its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from norm_spellings import EPS, gemma, llama
from rewriting import check, each_dtype, refused, values


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = residual + x
    return llama(total, weight), total


ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda a, b: a + b,
    "function": lambda a, b: torch.add(a, b),
    "method": lambda a, b: b.add(a),
    "alpha-of-one": lambda a, b: torch.add(a, b, alpha=1),
    "dropout-of-nothing": lambda a, b: F.dropout(a, 0.0) + b,
}


@pytest.mark.quick(rewrites=("fused_add_rms_norm",))
@each_dtype
@pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
def test_fused_add_rms_norm(add, dtype):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = add(x, residual)
        return gemma(total, weight), total

    x, residual = values(2, 3, 8, dtype=dtype), values(2, 3, 8, dtype=dtype, seed=1)
    found = check(function, x, residual, values(8, dtype=dtype), counts={"fused_add_rms_norm": 1})
    (call,) = found.calls("fused_add_rms_norm")
    assert (call["eps"], call["offset"], call["casting_mode"]) == (EPS, 1.0, "gemma")
    assert found.calls("rms_norm") == []


def test_fused_add_rms_norm_of_a_sum_that_nothing_else_uses():
    function = lambda x, residual, weight: norm_of_sum(x, residual, weight)[0]
    check(
        function,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        counts={"fused_add_rms_norm": 1},
    )


def test_fused_add_rms_norm_of_an_op_called_with_keywords():
    """`fuse` calls the op so in a norm whose parameters FSDP2 holds."""

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.liger.rms_norm.default(
            x + residual, casting_mode="gemma", offset=1.0, weight=weight
        )

    inputs = values(2, 3, 8), values(2, 3, 8, seed=1), values(8)
    found = check(function, *inputs, counts={"fused_add_rms_norm": 1})
    (call,) = found.calls("fused_add_rms_norm")
    assert (call["offset"], call["casting_mode"]) == (1.0, "gemma")


def test_fused_add_rms_norms_along_a_residual_stream():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(llama(x, weight))
        return llama(x, weight)

    # The first norm is of an input.
    counts = {"rms_norm": 1, "fused_add_rms_norm": 3}
    check(function, values(2, 3, 8), values(8), counts=counts)


def test_fused_add_rms_norm_of_any_number_of_rows():
    check(
        norm_of_sum,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        then=(values(4, 5, 8), values(4, 5, 8, seed=1), values(8)),
        counts={"fused_add_rms_norm": 1},
        dynamic=True,
    )


def sum_scaled(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = torch.add(x, residual, alpha=2)
    return llama(total, weight), total


def sum_written(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    total.mul_(2)
    return llama(total, weight), total


def term_written(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    residual = residual * 1.5
    total = x + residual
    residual.mul_(2)
    return llama(total, weight), total, residual


def sum_without_gradient(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    with torch.no_grad():
        total = x + residual
    return llama(total, weight), total


def weight_of_the_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    weight = weight * torch.tanh(total).mean((0, 1))
    return llama(total, weight), total


NO_FUSED_ADD = {
    "alpha": (sum_scaled, ""),
    "sum-written": (sum_written, "written in place"),
    "term-written": (term_written, "written in place"),
    "no_grad": (sum_without_gradient, "different gradient or autocast modes"),
    "weight-of-the-sum": (weight_of_the_sum, "only after the sum is used"),
}


@pytest.mark.parametrize(("function", "reason"), NO_FUSED_ADD.values(), ids=NO_FUSED_ADD)
def test_near_misses_of_fused_add_rms_norm(function, reason):
    refused(
        function,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        op="fused_add_rms_norm",
        reason=reason,
        counts={"rms_norm": 1},
    )


@pytest.mark.parametrize("shape", [(8,), (1, 3, 8), (2, 3, 1)])
def test_fused_add_rms_norm_of_a_broadcast_residual(shape):
    refused(
        norm_of_sum, *(values(2, 3, 8), values(*shape), values(8)), op="fused_add_rms_norm",
        reason="broadcast", counts={"rms_norm": 1},
    )  # fmt: skip


def test_a_number_added_is_no_residual():
    refused(
        lambda x, weight: llama(x + 1.0, weight),
        *(values(2, 3, 8), values(8)),
        op="fused_add_rms_norm",
        counts={"rms_norm": 1},
    )


def test_fused_add_rms_norm_of_two_dtypes():
    """Their sum is float32, the op's as PyTorch's."""
    x, residual = values(2, 3, 8, dtype=torch.bfloat16), values(2, 3, 8)
    check(norm_of_sum, x, residual, values(8), counts={"fused_add_rms_norm": 1})
