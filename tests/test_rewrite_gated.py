"""swiglu, geglu, clamped_swiglu and relu_squared, found in the code of models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewriting import DTYPES, check, each_dtype, refused, values

every_dtype = pytest.mark.parametrize(
    "dtype", [*DTYPES.values(), torch.float16], ids=[*DTYPES, "float16"]
)


def halves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return values(2, 3, 8, dtype=dtype), values(2, 3, 8, dtype=dtype, seed=1)


def origin(node: Any) -> str:
    """The name of the input that a node is made of."""
    while node.op != "placeholder":
        node = node.args[0]
    return node.name


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
}


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


def chunked(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.chunk(2, dim=-1)


PACKED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": chunked,
    "split": lambda packed: torch.split(packed, packed.shape[-1] // 2, dim=-1),
    "slices": lambda packed: (packed[..., :8], packed[..., 8:]),
    "neighbours": lambda packed: (packed[..., ::2], packed[..., 1::2]),
    "unbound": lambda packed: packed.view(2, 3, 2, 8).unbind(2),
}


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


def test_swiglu_in_a_wider_dtype():
    """In float32 as a whole it is the op of float32; in part it rounds where the op does not."""
    wide = lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)
    check(wide, *halves(torch.bfloat16), counts={"swiglu": 1})
    partly = lambda gate, up: F.silu(gate.float()).to(gate.dtype) * up
    refused(partly, *halves(torch.bfloat16), op="swiglu", reason="casts")


# GEGLU


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


# The clamped SwiGLU


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


# The squared ReLU


RELUS_SQUARED: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: torch.square(F.relu(x)),
    "method": lambda x: x.relu().square(),
    "pow": lambda x: torch.relu(x).pow(2),
    "operator": lambda x: F.relu(x) ** 2,
    "pow-of-a-float": lambda x: torch.pow(F.relu(x, inplace=False), 2.0),
    "dropout-of-nothing": lambda x: F.dropout(F.relu(x), 0.0).square(),
}


@every_dtype
@pytest.mark.parametrize("function", RELUS_SQUARED.values(), ids=RELUS_SQUARED)
def test_relu_squared(function, dtype):
    check(function, values(2, 3, 8, dtype=dtype), counts={"relu_squared": 1})


def test_relu_squared_by_a_product():
    def function(x: Tensor) -> Tensor:
        activation = F.relu(x)
        return activation * activation

    check(function, values(2, 3, 8), counts={"relu_squared": 1})


def test_relu_squared_of_any_number_of_rows():
    function = RELUS_SQUARED["square"]
    inputs, then = (values(2, 3, 8),), (values(4, 5, 8),)
    check(function, *inputs, then=then, counts={"relu_squared": 1}, dynamic=True)


def relu_also_used(x: Tensor) -> Any:
    activation = F.relu(x)
    return activation.square(), activation


def relu_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        activation = F.relu(x)
    return activation.square() * x


def relu_under_autocast(x: Tensor) -> Tensor:
    activation = F.relu(x)
    with torch.autocast("cpu", torch.bfloat16):
        return activation.square()


def relu_in_place(x: Tensor) -> Tensor:
    return F.relu(x * 1.0, inplace=True).square()


def relu_source_written(x: Tensor) -> Tensor:
    x = x * 1.0
    activation = F.relu(x)
    x.mul_(2)
    return activation.square() + x


NO_RELU_SQUARED: dict[str, tuple[Callable[..., Any], str]] = {
    "extra-user": (relu_also_used, "used elsewhere"),
    "no_grad": (relu_without_gradient, "different gradient or autocast modes"),
    "autocast": (relu_under_autocast, "different gradient or autocast modes"),
    "inplace": (relu_in_place, ""),
    "source-written": (relu_source_written, "written in place"),
    "cube": (lambda x: F.relu(x).pow(3), ""),
    "relu6": (lambda x: F.relu6(x).square(), ""),
    "of-the-square": (lambda x: F.relu(x.square()), ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_RELU_SQUARED.values(), ids=NO_RELU_SQUARED)
def test_near_misses_of_relu_squared(function, reason):
    refused(function, values(2, 3, 8), op="relu_squared", reason=reason)


def test_relu_squared_of_integers():
    x = torch.arange(-3, 3)
    refused(RELUS_SQUARED["square"], x, op="relu_squared", reason="integers")


def test_relu_squared_in_a_wider_dtype():
    """The op of float32, whose result is rounded; not where the activation is rounded first."""
    x = values(2, 3, 8, dtype=torch.bfloat16)
    wide = lambda x: F.relu(x.float()).square().to(x.dtype)
    check(wide, x, counts={"relu_squared": 1})
    refused(lambda x: F.relu(x).float().square(), x, op="relu_squared", reason="casts")
