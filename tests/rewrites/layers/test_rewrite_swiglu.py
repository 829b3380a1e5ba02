"""swiglu, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gated_spellings import PACKED, chunked, halves, origin
from rewriting import Rewriter, check, each_dtype, refused, values


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


SWIGLUS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": swiglu,
    "commuted": lambda gate, up: up * F.silu(gate),
    "function": lambda gate, up: torch.mul(F.silu(gate, inplace=False), up),
    "method": lambda gate, up: F.silu(gate).mul(up),
    "dropout-of-nothing": lambda gate, up: F.dropout(F.silu(gate), 0.0) * up,
    "casts-that-do-nothing": lambda gate, up: F.silu(gate.to(gate.dtype)).type_as(up) * up,
    "contiguous": lambda gate, up: F.silu(gate.contiguous()) * up,
    "silu-in-float32": lambda gate, up: F.silu(gate.float()).to(gate.dtype) * up,
}


@pytest.mark.quick(rewrites=("swiglu",))
@each_dtype
@pytest.mark.parametrize("function", SWIGLUS.values(), ids=SWIGLUS)
def test_swiglu(function, dtype):
    (call,) = check(function, *halves(dtype), counts={"swiglu": 1}).calls("swiglu")
    assert (call["gate_multiplier"], call["down_multiplier"]) == (1.0, 1.0)
    # Which of the two is the gate.
    assert (origin(call["gate"]), origin(call["up"])) == ("l_gate_", "l_up_")


def test_swiglu_in_float16():
    check(swiglu, *halves(torch.float16), counts={"swiglu": 1})


def test_swiglu_of_a_module():
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
            self.act_fn = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    torch.manual_seed(0)
    check(MLP(), values(2, 3, 8), counts={"swiglu": 1})


def test_swiglu_with_the_sigmoid_written_out():
    """In float32; a narrower one rounds the sigmoid before the product, and the op does not."""
    function = lambda gate, up: gate * torch.sigmoid(gate) * up
    check(function, *halves(), counts={"swiglu": 1})
    check(lambda gate, up: gate.sigmoid() * gate * up, *halves(), counts={"swiglu": 1})
    check(function, *halves(torch.bfloat16), counts={})


@each_dtype
def test_swiglu_of_falcon_h1(dtype):
    def function(gate: Tensor, up: Tensor) -> Tensor:
        return up * F.silu(gate * 0.5)

    (call,) = check(function, *halves(dtype), counts={"swiglu": 1}).calls("swiglu")
    assert (call["gate_multiplier"], call["gate"].op) == (0.5, "placeholder")


@each_dtype
@pytest.mark.parametrize("unpack", PACKED.values(), ids=PACKED)
def test_swiglu_of_packed_halves(unpack, dtype):
    """They are read where they lie: nothing is copied."""

    def function(packed: Tensor) -> Tensor:
        gate, up = unpack(packed)
        return up * F.silu(gate)

    found = check(function, values(2, 3, 16, dtype=dtype), counts={"swiglu": 1})
    assert not [node for node in found.nodes() if node.target == "contiguous"]


@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_of_any_number_of_rows(packed):
    if packed:
        function = lambda packed: F.silu(chunked(packed)[0]) * chunked(packed)[1]
        inputs, then = (values(2, 3, 16),), (values(4, 5, 16),)
    else:
        function, inputs = swiglu, halves()
        then = values(4, 5, 8), values(4, 5, 8, seed=1)
    check(function, *inputs, then=then, counts={"swiglu": 1}, dynamic=True)


def activation_also_used(gate: Tensor, up: Tensor) -> Any:
    activation = F.silu(gate)
    return activation * up, activation.sum()


def gate_written_in_between(gate: Tensor, up: Tensor) -> Tensor:
    gate = torch.tanh(gate)
    activation = F.silu(gate)
    gate.add_(1)
    return activation * up + gate


def up_written_in_between(gate: Tensor, up: Tensor) -> Tensor:
    up = up * 1.5
    activation = F.silu(gate)
    up[0].mul_(2)
    return activation * up


def activation_written_in_between(gate: Tensor, up: Tensor) -> Tensor:
    activation = F.silu(gate)
    activation.mul_(2)
    return activation * up


def activation_without_gradient(gate: Tensor, up: Tensor) -> Tensor:
    with torch.no_grad():
        activation = F.silu(gate)
    return activation * up


def activation_under_autocast(gate: Tensor, up: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        activation = F.silu(gate)
    return activation * up


NO_SWIGLU: dict[str, tuple[Callable[..., Any], str]] = {
    "extra-user": (activation_also_used, "used elsewhere"),
    "no_grad": (activation_without_gradient, "different gradient or autocast modes"),
    "autocast": (activation_under_autocast, "different gradient or autocast modes"),
    "inplace": (lambda gate, up: F.silu(gate * 1.0, inplace=True) * up, ""),
    "up-written": (up_written_in_between, "written in place"),
    "sum": (lambda gate, up: F.silu(gate) + up, ""),
    "mish": (lambda gate, up: F.mish(gate) * up, ""),
    "another-sigmoid": (lambda gate, up: gate * torch.sigmoid(up) * up, ""),
    "number": (lambda gate, up: F.silu(gate) * 2.0, ""),
    "dropout": (lambda gate, up: F.dropout(F.silu(gate), 1.0) * up, ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_SWIGLU.values(), ids=NO_SWIGLU)
def test_near_misses_of_swiglu(function, reason):
    refused(function, *halves(), op="swiglu", reason=reason)


def test_a_written_activation_is_no_swiglu():
    """`up` does not need the activation's gradient, so that autograd lets it be written."""
    gate, up = halves()
    refused(activation_written_in_between, gate, up.detach(), op="swiglu", reason="elsewhere")


def test_a_write_between_the_operations_of_swiglu():
    gate, up = (one.detach() for one in halves())
    refused(gate_written_in_between, gate, up, op="swiglu", reason="written in place")


@pytest.mark.parametrize("shape", [(8,), (2, 1, 8), (2, 3, 1)])
def test_swiglu_of_broadcast_halves(shape):
    gate, up = values(2, 3, 8), values(*shape)
    refused(swiglu, gate, up, op="swiglu", reason="broadcast")
    refused(swiglu, up, gate, op="swiglu", reason="broadcast")


def test_swiglu_of_two_dtypes():
    """The product is of the wider, as the op's."""
    gate, up = halves()
    check(swiglu, gate.detach().bfloat16(), up, counts={"swiglu": 1})


def test_up_written_after_its_cast():
    """The op would read `up` itself, and not the copy that the code made."""

    def function(gate: Tensor, up: Tensor) -> Tensor:
        up = up * 2
        wide = up.float()
        up.zero_()
        return (F.silu(gate.float()) * wide).to(gate.dtype)

    # Not `check`, whose truth is in float32, where the cast copies nothing.
    torch._dynamo.reset()
    rewriter, inputs = Rewriter(), [one.detach() for one in halves(torch.bfloat16)]
    y = torch.compile(function, backend=rewriter, fullgraph=True)(*inputs)
    torch.testing.assert_close(y, function(*inputs))
    assert rewriter.counts() == {"swiglu": 1}, "the product in float32"


def test_swiglu_in_a_wider_dtype():
    """In float32 as a whole it is the op of float32. A result that stays float32 is not."""
    wide = lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)
    check(wide, *halves(torch.bfloat16), counts={"swiglu": 1})
    partly = lambda gate, up: F.silu(gate.float()) * up
    refused(partly, *halves(torch.bfloat16), op="swiglu", reason="the dtype torch.bfloat16")
