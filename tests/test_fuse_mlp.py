"""What `fuse` takes for a gated activation: modules that have one, and modules that nearly have."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from liger_ops import fuse, unfuse
from liger_ops.fusion import FuseReport, gated

HIDDEN, WIDTH = 16, 24


class Gated(nn.Module):
    """A class whose name says little. The others here change one thing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, WIDTH)
        self.b = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(WIDTH, HIDDEN)
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(self.a(hidden), self.b(hidden)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class Packed(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.a = nn.Linear(HIDDEN, 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(*self.a(hidden).chunk(2, -1)))


class InPairs(Packed):
    def forward(self, hidden: Tensor) -> Tensor:
        packed = self.a(hidden)
        return self.out(self.gated(packed[..., ::2], packed[..., 1::2]))


class Plain(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.activation = ACT2FN["relu2"]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.activation(self.a(hidden)))


class UpFirst(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        up = self.b(hidden)
        return self.out(up * self.activation(self.a(hidden)))


class GateSecond(Gated):
    def gated(self, up: Tensor, gate: Tensor) -> Tensor:
        return self.activation(gate) * up


class Multiplied(Gated):
    """As in Falcon-H1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_multiplier, self.down_multiplier = 0.7, 0.3

    def forward(self, hidden: Tensor) -> Tensor:
        y = self.b(hidden) * self.activation(self.a(hidden) * self.gate_multiplier)
        return self.out(y) * self.down_multiplier


class Limited(Gated):
    """As in DeepSeek-V4; no number stands for no limit."""

    def __init__(self, limit: float = 7.0, alpha: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.limit, self.alpha, self.offset = limit, alpha, offset

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


class LimitedInPairs(InPairs):
    """As GPT-OSS's experts."""

    limit, alpha = 7.0, 1.702

    def __init__(self) -> None:
        super().__init__()
        self.limit = 7.0

    gated = Limited.gated
    offset = 1.0


def activated(activation: Any, module: Gated | None = None) -> nn.Module:
    module = Gated() if module is None else module
    del module.activation
    module.activation = ACT2FN[activation] if isinstance(activation, str) else activation
    return module


class Adapted(nn.Module):
    """A linear map with a low rank added, as PEFT wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(module: Gated) -> nn.Module:
    module.a, module.out = Adapted(module.a), Adapted(module.out)
    return module


def clamped(alpha: float, limit: float, up_offset: float, interleaved: bool) -> dict[str, Any]:
    return {"alpha": alpha, "limit": limit, "up_offset": up_offset, "interleaved": interleaved}


COMPUTES = [
    (Gated(), "swiglu", {}),
    (UpFirst(), "swiglu", {}),
    (GateSecond(), "swiglu", {}),
    (adapted(Gated()), "swiglu", {}),
    (activated(F.silu), "swiglu", {}),
    (Packed(), "swiglu", {}),
    (Multiplied(), "swiglu", {"gate_multiplier": 0.7, "down_multiplier": 1.0}),
    (activated("gelu_pytorch_tanh"), "geglu", {"approximate": "tanh"}),
    (activated("gelu_pytorch_tanh", Packed()), "geglu", {"approximate": "tanh"}),
    (activated("gelu", GateSecond()), "geglu", {"approximate": "none"}),
    (activated("quick_gelu"), "clamped_swiglu", clamped(1.702, math.inf, 0.0, False)),
    (InPairs(), "clamped_swiglu", clamped(1.0, math.inf, 0.0, True)),
    (Limited(), "clamped_swiglu", clamped(1.0, 7.0, 0.0, False)),
    (Limited(3.5, 1.702, 1.0), "clamped_swiglu", clamped(1.702, 3.5, 1.0, False)),
    (LimitedInPairs(), "clamped_swiglu", clamped(1.702, 7.0, 1.0, True)),
    (Plain(), "relu_squared", {}),
]


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient."""
    x = x.clone().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize(
    ("module", "op", "options"),
    COMPUTES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _, _) in enumerate(COMPUTES)],
)
def test_op_and_options_are_found(module: nn.Module, op: str, options: dict[str, Any]) -> None:
    """With the results of the module, in float32 and float64, and as near to truth in bfloat16."""
    model = nn.Sequential(copy.deepcopy(module))
    report = fuse(model)
    assert [(entry.op, entry.options) for entry in report.fused] == [(op, options)]
    assert report.fused[0].kind == "gated activation"
    x = 4 * torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for train in (False, True):
        expected = results(module.train(train), x)
        for ours, theirs in zip(results(model.train(train), x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    low = x.bfloat16()
    truth = results(copy.deepcopy(module).bfloat16().double(), low.double())
    before = results(copy.deepcopy(module).bfloat16(), low)
    for ours, theirs, true in zip(results(model.bfloat16(), low), before, truth, strict=True):
        assert ours.dtype is torch.bfloat16
        error, error_before = ((y.double() - true).norm() for y in (ours, theirs))
        assert error <= 1.5 * error_before + 2**-8 * true.norm()


class Dropping(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.dropout(super().gated(gate, up), 0.1, self.training)


class WrongHalf(Packed):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * gate


class Shifted(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up) + 1e-3


class ClampedAfter(Gated):
    """As in Step-3.7."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate).clamp(max=7.0) * up


class MixedBetween(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.mix(super().gated(gate, up))


class Residual(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden


class Scaled(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden / 2)


class Widened(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate.float(), up.float())


class Detached(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up.detach())


class SharpInHalfPrecision(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().gated(gate, up) * (1 if gate.dtype is torch.float32 else 1.05)


class OwnParameter(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class TwoArguments(Gated):
    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(hidden) * scale


class AsksItsWeight(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.a.weight.dtype))


class CallsTwice(Gated):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.gated(self.a(hidden), self.a(hidden)))


class Remembers(Gated):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        self.last = gate
        return super().gated(gate, up)


def hooked(module: Gated) -> nn.Module:
    module.activation.register_forward_hook(lambda module, args, y: y + 1)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


NO_OP = "it computes none of swiglu, geglu, clamped_swiglu and relu_squared in float32"

# Modules, each one thing away from an op, and what the report must say of it.
NEAR_MISSES = [
    (activated("relu"), NO_OP),
    (activated("mish"), NO_OP),
    (activated("gelu_10"), NO_OP),
    (activated(nn.Sigmoid(), Packed()), NO_OP),
    (WrongHalf(), NO_OP),
    (Shifted(), NO_OP),
    (ClampedAfter(), NO_OP),
    (Dropping(), "it is swiglu in evaluation, and something else in training"),
    (MixedBetween(), "it has 4 children that may be projections"),
    (Residual(), "it changes what out returns"),
    (Scaled(), "it changes its input before it projects it"),
    (Widened(), "it returns float32 for projections of bfloat16"),
    (Detached(), "its gradient cannot be taken"),
    (SharpInHalfPrecision(), "rounds elsewhere in bfloat16"),
    (OwnParameter(), "it has parameters or buffers of its own: scale"),
    (TwoArguments(), "its forward takes (hidden, scale=1.0)"),
    (AsksItsWeight(), "it fails on the CPU: AttributeError"),
    (CallsTwice(), "it calls a, a, out, not one or two projections and a third"),
    (Remembers(), "its forward changes its attributes"),
    (hooked(Gated()), "activation, which would not be called, has hooks"),
    (with_own_forward(Gated()), "the instance has a forward of its own"),
]


@pytest.mark.parametrize(
    ("module", "reason"),
    NEAR_MISSES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _) in enumerate(NEAR_MISSES)],
)
def test_near_miss_is_left_with_the_reason(module: nn.Module, reason: str) -> None:
    # A name that the report takes for that of a gated MLP.
    cls = type(module)
    module.__class__ = type(f"{cls.__name__}GLU", (cls,), {})
    named = type(module)
    report = fuse(nn.Sequential(module))
    assert not report
    assert type(module) is named
    assert [(entry.name, entry.class_name) for entry in report.left] == [("0", named.__name__)]
    assert reason in report.left[0].reason


def test_left_modules_that_no_one_calls_gated_are_not_reported() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert fuse(nn.ModuleList([plain, Shifted(), activated("relu")])) == FuseReport((), ())


def test_only_the_forward_of_the_module_changes() -> None:
    module, other = Gated(), Gated()
    forward, state, text = Gated.forward, module.state_dict(), repr(module)
    children = dict(module.named_children())
    assert len(fuse(module)) == 1
    assert isinstance(module, Gated)
    assert type(other) is Gated and Gated.forward is forward
    assert type(module).__name__ == "Gated" and repr(module) == text
    assert inspect.signature(module.forward) == inspect.signature(other.forward)
    assert dict(module.named_children()) == children
    assert (
        all(value is state[name] for name, value in module.state_dict(keep_vars=True).items())
        or module.state_dict().keys() == state.keys()
    )
    x = torch.randn(2, HIDDEN)
    assert torch.equal(module(hidden=x), module(x))
    with pytest.raises(TypeError):
        module(x=x)
    assert unfuse(module) == 1
    assert type(module) is Gated


def test_second_call_changes_nothing() -> None:
    module = Gated()
    fuse(module)
    cls = type(module)
    assert fuse(module) == FuseReport((), ())
    assert type(module) is cls


def test_children_are_called_in_their_order() -> None:
    """So that what they draw, as the dropout of an adapter, is what it was."""
    for cls in (Gated, UpFirst, GateSecond):
        module = cls()
        orders: list[list[str]] = []
        for name, child in module.named_children():
            child.register_forward_hook(
                lambda *_, name=name, orders=orders: orders[-1].append(name)
            )
        module.activation._forward_hooks.clear()
        for change in (unfuse, fuse):
            change(module)
            orders.append([])
            module(torch.randn(2, HIDDEN))
        assert orders[0] == orders[1]
        assert len(orders[0]) == 3


@pytest.mark.parametrize("before", [False, True])
def test_wrapped_projections(before: bool) -> None:
    """Adapters put in before fuse or after are called, and trained."""
    module = Gated()
    if before:
        adapted(module)
    assert len(fuse(module)) == 1
    if not before:
        adapted(module)
    original = copy.deepcopy(module)
    assert unfuse(original) == 1
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(results(module, x), results(original, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_of_the_module_and_its_projections_run() -> None:
    module = Gated()
    calls = []
    for hooked_module in (module, module.a, module.out):
        hooked_module.register_forward_hook(lambda module, args, y: calls.append(module))
    assert len(fuse(module)) == 1
    module(torch.randn(2, HIDDEN))
    assert calls == [module.a, module.out, module]


def test_equal_modules_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []
    find = gated.find
    monkeypatch.setattr(gated, "find", lambda *args: probed.append(args) or find(*args))
    model = nn.ModuleList([*(Gated() for _ in range(20)), activated("gelu"), Limited(), Limited(3)])
    assert len(fuse(model)) == 23
    assert len(probed) == 4


# Experts


def experts(
    gate: Callable[[Any, Tensor], Tensor] | None = None, activation: str = "silu"
) -> nn.Module:
    """A module as transformers writes it, with `_apply_gate` if one is given."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 3
            self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * WIDTH, HIDDEN) / 4)
            self.down_proj = nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 4)
            self.act_fn = ACT2FN[activation]

        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            y = torch.zeros_like(hidden)
            for i in range(index.shape[1]):
                gate_up = torch.einsum("mh,mwh->mw", hidden, self.gate_up_proj[index[:, i]])
                gate, up = gate_up.chunk(2, -1)
                gated = self.act_fn(gate) * up
                out = torch.einsum("mw,mhw->mh", gated, self.down_proj[index[:, i]])
                y = y + out * weights[:, i, None]
            return y

    if gate is not None:
        Experts._apply_gate = gate
    config = SimpleNamespace(_experts_implementation="batched_mm")
    return use_experts_implementation(Experts)(config)


def step(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate).clamp(max=7.0) * up


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    ("gate", "activation", "op"),
    [(None, "silu", "swiglu"), (None, "gelu", "geglu"), (in_pairs, "silu", "clamped_swiglu")],
)
def test_experts(
    gate: Callable[[Any, Tensor], Tensor] | None, activation: str, op: str, implementation: str
) -> None:
    module = experts(gate, activation)
    module.config._experts_implementation = implementation
    x = torch.randn(4, HIDDEN)
    index, weights = torch.tensor([[0, 2], [1, 2], [0, 1], [2, 1]]), torch.rand(4, 2)
    expected = module(x, index, weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    assert [entry.op for entry in fuse(module).fused] == [op]
    y = module(x, index, weights)
    torch.testing.assert_close(y, expected)
    grads = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)
    assert unfuse(module) == 1


def test_experts_near_misses() -> None:
    module = experts(step)
    assert [entry.reason for entry in fuse(module).left] == [NO_OP]
    module = experts(lambda self, gate_up: self.gate_up_proj @ gate_up)
    assert "its _apply_gate fails on the CPU" in fuse(module).left[0].reason
    module = experts()
    module.act_fn.register_forward_hook(lambda *_: None)
    assert [entry.reason for entry in fuse(module).left] == ["its activation has hooks"]


def test_eager_experts_that_have_the_activation_in_their_forward_are_left() -> None:
    module = experts()
    module.config._experts_implementation = "eager"
    report = fuse(module)
    assert not report
    assert "its experts_implementation is 'eager'" in report.left[0].reason
    x, index, weights = (
        torch.randn(4, HIDDEN),
        torch.zeros(4, 1, dtype=torch.long),
        torch.ones(4, 1),
    )
    eager = module(x, index, weights)
    module.config._experts_implementation = "batched_mm"
    assert len(fuse(module)) == 1
    torch.testing.assert_close(module(x, index, weights), eager)


def test_class_of_another_make_is_not_undone() -> None:
    """A parametrization changes the class too; nothing is undone before it is removed."""
    module = experts()
    model = nn.ModuleDict({"experts": module, "norm": nn.LayerNorm(8)})
    assert len(fuse(model)) == 2
    parametrize.register_parametrization(module, "down_proj", nn.Identity())
    norm = model["norm"]
    with pytest.raises(RuntimeError, match="the class of a ParametrizedExperts was changed"):
        unfuse(model)
    assert model["norm"] is norm
    parametrize.remove_parametrizations(module, "down_proj")
    assert unfuse(model) == 2


def test_parametrized_projection() -> None:
    module = Gated()
    parametrizations.weight_norm(module.a)
    original = copy.deepcopy(module)
    assert len(fuse(module)) == 1
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(module(x), original(x))
