"""geglu, found in the code of models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_spellings import PACKED, halves, origin
from rewriting import check, each_dtype, refused, values


def new_gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


GEGLUS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "tanh": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, "tanh"),
    "none": (lambda gate, up: F.gelu(gate) * up, "none"),
    "none-named": (lambda gate, up: F.gelu(gate, approximate="none") * up, "none"),
    "commuted": (lambda gate, up: up * F.gelu(gate), "none"),
    "builtin": (lambda gate, up: torch._C._nn.gelu(gate, approximate="tanh").mul(up), "tanh"),
    "NewGELU": (lambda gate, up: new_gelu(gate) * up, "tanh"),
    "NewGELU-commuted": (lambda gate, up: up * new_gelu(gate), "tanh"),
    "dropout-of-nothing": (lambda gate, up: F.gelu(F.dropout(gate, 0.0)) * up, "none"),
}


@pytest.mark.quick(rewrites=("geglu",))
@each_dtype
@pytest.mark.parametrize(("function", "approximate"), GEGLUS.values(), ids=GEGLUS)
def test_geglu(function, approximate, dtype):
    (call,) = check(function, *halves(dtype), counts={"geglu": 1}).calls("geglu")
    assert call["approximate"] == approximate
    assert (origin(call["gate"]), origin(call["up"])) == ("l_gate_", "l_up_")


@pytest.mark.parametrize("unpack", PACKED.values(), ids=PACKED)
def test_geglu_of_packed_halves(unpack):
    def function(packed: Tensor) -> Tensor:
        up, gate = unpack(packed)
        return up * F.gelu(gate)

    check(function, values(2, 3, 16, dtype=torch.bfloat16), counts={"geglu": 1})


class Diffusers(nn.Module):
    """The activation of diffusers, whose projection has the gate in its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 32)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


def test_geglu_of_diffusers():
    """The halves are read where they lie: nothing is copied."""
    torch.manual_seed(0)
    found = check(Diffusers(), values(2, 3, 8), counts={"geglu": 1})
    (call,) = found.calls("geglu")
    assert call["approximate"] == "none"
    halves = [call[name].meta["example_value"] for name in ("gate", "up")]
    assert [half.stride(-2) for half in halves] == [32, 32]
    assert [half.storage_offset() for half in halves] == [16, 0]


@pytest.mark.parametrize("function", [f for f, _ in GEGLUS.values()], ids=GEGLUS)
def test_geglu_of_any_number_of_rows(function):
    then = values(4, 5, 8), values(4, 5, 8, seed=1)
    check(function, *halves(), then=then, counts={"geglu": 1}, dynamic=True)


def gelu_with(*, cubed: float = 3.0, coefficient: float = 0.044715, half: float = 0.5) -> Any:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (gate + coefficient * torch.pow(gate, cubed))
        return half * gate * (1.0 + torch.tanh(inner)) * up

    return function


def gelu_also_used(gate: Tensor, up: Tensor) -> Any:
    activation = F.gelu(gate)
    return activation * up, activation


def gelu_gate_written(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate * 1.5
    activation = F.gelu(gate)
    gate.copy_(up)
    return activation * up + gate


def gelu_without_gradient(gate: Tensor, up: Tensor) -> Tensor:
    with torch.no_grad():
        activation = F.gelu(gate, approximate="tanh")
    return activation * up


NO_GEGLU: dict[str, tuple[Callable[..., Any], str]] = {
    "extra-user": (gelu_also_used, "used elsewhere"),
    "no_grad": (gelu_without_gradient, "different gradient or autocast modes"),
    "exponent": (gelu_with(cubed=4.0), "pow has 4.0"),
    "coefficient": (gelu_with(coefficient=0.05), "mul has 0.05"),
    "factor": (gelu_with(half=1.0), "mul has 1.0"),
    "quick": (lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up, ""),
    "alone": (lambda gate, up: F.gelu(gate), ""),
    "ratio": (lambda gate, up: F.gelu(gate) / up, ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_GEGLU.values(), ids=NO_GEGLU)
def test_near_misses_of_geglu(function, reason):
    refused(function, *halves(), op="geglu", reason=reason)


def test_a_write_between_the_operations_of_geglu():
    gate, up = (one.detach() for one in halves())
    refused(gelu_gate_written, gate, up, op="geglu", reason="written in place")


@pytest.mark.parametrize("shape", [(8,), (2, 1, 8)])
def test_geglu_of_broadcast_halves(shape):
    function = GEGLUS["tanh"][0]
    refused(function, values(2, 3, 8), values(*shape), op="geglu", reason="broadcast")
