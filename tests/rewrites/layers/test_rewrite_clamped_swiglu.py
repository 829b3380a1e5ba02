"""clamped_swiglu, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gated_spellings import every_dtype, halves
from rewriting import check, each_dtype, refused, values


def clamped(
    limit: float = 2.0, lower: float = -2.0, alpha: float = 1.702, offset: float = 1.0
) -> Callable[[Tensor, Tensor], Tensor]:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(min=None, max=limit)
        up = up.clamp(min=lower, max=limit)
        glu = gate * torch.sigmoid(gate * alpha)
        return (up + offset) * glu

    return function


def clamped_otherwise(gate: Tensor, up: Tensor) -> Tensor:
    gate = torch.clamp(gate, max=2.0)
    return torch.sigmoid(1.702 * gate).mul(gate).mul(1.0 + torch.clip(up, -2.0, 2.0))


@pytest.mark.quick(rewrites=("clamped_swiglu",))
@every_dtype
@pytest.mark.parametrize("function", [clamped(), clamped_otherwise], ids=["gpt-oss", "otherwise"])
def test_clamped_swiglu(function, dtype):
    gate, up = (one.detach().mul(3).requires_grad_() for one in halves(dtype))
    found = check(function, gate, up, counts={"clamped_swiglu": 1})
    (call,) = found.calls("clamped_swiglu")
    assert (call["alpha"], call["limit"], call["up_offset"]) == (1.702, 2.0, 1.0)


def test_clamped_swiglu_of_other_constants():
    found = check(clamped(7.0, -7.0, 1.5, 0.25), *halves(), counts={"clamped_swiglu": 1})
    (call,) = found.calls("clamped_swiglu")
    assert (call["alpha"], call["limit"], call["up_offset"]) == (1.5, 7.0, 0.25)


@each_dtype
def test_clamped_swiglu_of_packed_neighbours(dtype):
    function = lambda packed: clamped()(packed[..., ::2], packed[..., 1::2])
    check(function, values(2, 3, 16, dtype=dtype), counts={"clamped_swiglu": 1})


def test_clamped_swiglu_of_any_number_of_rows():
    then = values(4, 5, 8), values(4, 5, 8, seed=1)
    check(clamped(), *halves(), then=then, counts={"clamped_swiglu": 1}, dynamic=True)


def clamped_gate_also_used(gate: Tensor, up: Tensor) -> Any:
    gate = gate.clamp(max=2.0)
    return (up.clamp(-2.0, 2.0) + 1.0) * (gate * torch.sigmoid(gate * 1.702)), gate


def gate_clamped_below(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(-2.0, 2.0)
    return (up.clamp(-2.0, 2.0) + 1.0) * (gate * torch.sigmoid(gate * 1.702))


def sigmoid_of_the_unclamped(gate: Tensor, up: Tensor) -> Tensor:
    return (up.clamp(-2.0, 2.0) + 1.0) * (gate.clamp(max=2.0) * torch.sigmoid(gate * 1.702))


def up_written(gate: Tensor, up: Tensor) -> Tensor:
    up = up * 1.5
    gate = gate.clamp(max=2.0)
    glu = gate * torch.sigmoid(gate * 1.702)
    limited = up.clamp(-2.0, 2.0)
    up.zero_()
    return (limited + 1.0) * glu


NO_CLAMPED_SWIGLU: dict[str, tuple[Callable[..., Any], str]] = {
    "lower-limit": (clamped(lower=-1.0), "other bounds than -limit and limit"),
    "extra-user": (clamped_gate_also_used, "used elsewhere"),
    "gate-clamped-below": (gate_clamped_below, "clamp has -2.0"),
    "two-gates": (sigmoid_of_the_unclamped, ""),
    "unclamped": (lambda gate, up: (up + 1.0) * (gate * torch.sigmoid(gate * 1.702)), ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_CLAMPED_SWIGLU.values(), ids=NO_CLAMPED_SWIGLU)
def test_near_misses_of_clamped_swiglu(function, reason):
    refused(function, *halves(), op="clamped_swiglu", reason=reason)


def test_a_write_between_the_operations_of_clamped_swiglu():
    gate, up = (one.detach() for one in halves())
    refused(up_written, gate, up, op="clamped_swiglu", reason="written in place")


def test_clamped_swiglu_of_two_limits():
    def function(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=3.0)
        return (up.clamp(-2.0, 2.0) + 1.0) * (gate * torch.sigmoid(gate * 1.702))

    found = check(function, *halves(), counts={})
    assert found.counts() == {}


def test_clamped_swiglu_of_broadcast_halves():
    refused(clamped(), values(2, 3, 8), values(8), op="clamped_swiglu", reason="broadcast")
