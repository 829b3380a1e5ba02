"""Linear layers with a LoRA of peft: what is fused, what is left, and what changes later."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from called_ops import called, saved_bytes
from graphs import Recorder, liger_ops_of
from liger_ops import fuse, unfuse

peft = pytest.importorskip("peft", reason="the adapters are peft's")

WHAT = "it is a peft.tuners.lora.layer.Linear"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def adapted(fused: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = {"target_modules": ["first", "second"], "r": 2, "init_lora_weights": False}
        model = peft.get_peft_model(Layers().to(dtype), peft.LoraConfig(**{**given, **options}))
    if fused:
        assert fuse(model, lora=True).counts() == {"lora_linear": 2}
    return model


def first(model: Any) -> Any:
    return model.base_model.model.first


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(model: nn.Module, other: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    for a, b in zip(step(model, x), step(other, x), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-5)


def calls_of(model: nn.Module) -> int:
    return called(model, torch.ones(2, 6))[1]["lora_linear_forward"]


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"r": 3, "lora_alpha": 1}])
def test_the_values_and_gradients_are_pefts(options: dict[str, Any]) -> None:
    model, fused = adapted(**options), adapted(True, **options)
    assert_same(fused, model)
    assert calls_of(fused) == 2
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_same(other, model)
        assert calls_of(other) == 2
    assert not fuse(fused, lora=True).findings
    assert unfuse(fused) == 2 and calls_of(fused) == 0
    assert not fuse(model).fused


@pytest.mark.parametrize("lora_dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("is_autocast", (False, True))
def test_bfloat16_and_autocast(lora_dtype: torch.dtype, is_autocast: bool) -> None:
    """peft keeps the adapters of a bfloat16 model in float32, unless it is told not to."""
    model, fused = adapted(False, torch.bfloat16), adapted(True, torch.bfloat16)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    truth = step(copy.deepcopy(model).double(), x.double())
    for one in (model, fused):
        for name, parameter in one.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.to(lora_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found, expected = step(fused, x), step(model, x)
    for a, b, exact in zip(found, expected, truth, strict=True):
        assert a.dtype is b.dtype
        error, own = (float((one.double() - exact).abs().max()) for one in (a, b))
        assert error <= 2 * own + torch.finfo(torch.bfloat16).eps * float(exact.abs().max())


def test_adapters_narrower_than_the_layer_are_pefts() -> None:
    """peft rounds x to the adapters' dtype, which the op does not."""
    model, fused = adapted(), adapted(True)
    for one in (model, fused):
        for name, parameter in one.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.bfloat16()
    assert calls_of(fused) == 0
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, step(fused, x), step(model, x)))


def test_an_input_that_peft_does_not_cast_raises_as_in_peft() -> None:
    models = adapted(False, torch.bfloat16), adapted(True, torch.bfloat16)
    for model in models:
        layers = model.base_model.model
        for layer in (layers.first, layers.second):
            layer.cast_input_dtype_enabled = False
            layer.lora_A.float(), layer.lora_B.float()
        with pytest.raises(RuntimeError, match="same dtype"):
            model(torch.ones(2, 6, dtype=torch.bfloat16))


def test_a_layer_with_a_forward_of_its_own_is_left() -> None:
    model = adapted(target_modules=["first"])
    first(model).forward = lambda x: x[..., :1].expand(*x.shape[:-1], 8)
    (entry,) = fuse(model, lora=True).left
    assert entry.reason == "the instance has a forward of its own"


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"lora_dropout": 0.1}, "its adapter has a dropout of 0.1"),
    "dora": ({"use_dora": True}, f"{WHAT} whose adapter default is not a plain LoRA"),
    "lora_bias": ({"lora_bias": True}, f"{WHAT} whose adapter default has a bias"),
}


@pytest.mark.parametrize(("options", "reason"), LEFT.values(), ids=LEFT)
def test_what_is_left(options: dict[str, Any], reason: str) -> None:
    report = fuse(adapted(target_modules=["first"], **options), lora=True)
    assert [entry.reason for entry in report.left] == [reason] and not report.fused


def test_other_layers_of_peft_are_left() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 6), "first": nn.Linear(6, 6)})
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["table"]), model)
    (entry,) = fuse(model, lora=True).left
    assert entry.reason == (
        "it is a peft.tuners.lora.layer.Embedding, not a peft.tuners.lora.layer.Linear"
    )


def test_code_that_computes_something_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = peft.tuners.lora.layer.Linear
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: original(self, x) * 1.01)
    reasons = {entry.reason for entry in fuse(adapted(), lora=True).left}
    assert reasons == {"its forward computes something else than lora_linear"}


def second_adapter(model: Any) -> None:
    config = peft.LoraConfig(target_modules=["first", "second"], r=3, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model.add_adapter("other", config)


def both_adapters(model: Any) -> None:
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def other_adapter(model: Any) -> None:
    second_adapter(model)
    model.set_adapter("other")


def hooked(part: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda model: part(model).register_forward_hook(lambda module, args, y: y * 1.5) and None


def set_dropout(model: Any) -> None:
    first(model).lora_dropout["default"] = nn.Dropout(1.0)


def set_base(model: Any) -> None:
    first(model).base_layer = nn.Sequential(first(model).base_layer, nn.Tanh())


def set_forward(model: Any) -> None:
    base = first(model).base_layer
    forward = base.forward
    base.forward = lambda x: forward(x) * 2


def set_scale(model: Any) -> None:
    first(model).set_scale("default", 0.25)


def learn_scale(model: Any) -> None:
    layer = first(model)
    layer.register_parameter("scale", nn.Parameter(torch.tensor(1.7)))
    layer.scaling["default"] = layer.scale


def add_bias(model: Any) -> None:
    first(model).lora_A["default"].bias = nn.Parameter(torch.ones(2))


def set_type(model: Any) -> None:
    scaled = {"forward": lambda self, x: 1.5 * nn.Linear.forward(self, x)}
    first(model).lora_A["default"].__class__ = type("Scaled", (nn.Linear,), scaled)


def set_own(name: str, part: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Set a method on an instance, whose result is doubled."""

    def change(model: Any) -> None:
        own = getattr(part(model), name)
        setattr(part(model), name, lambda *args, **options: 2 * own(*args, **options))

    return change


def set_class_of(part: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Set a subclass, whose forward doubles the result."""

    def change(model: Any) -> None:
        base = type(part(model))
        doubled = {"forward": lambda self, *args: 2 * base.forward(self, *args)}
        part(model).__class__ = type("Doubled", (base,), doubled)

    return change


def set_weight(model: Any) -> None:
    base = first(model).base_layer
    base.weight = nn.Parameter(base.weight.detach() * 2)


# Name -> the change, the calls of the op after it, and what the warning says.
CHANGES: dict[str, tuple[Callable[[Any], Any], int, str | None]] = {
    "merged": (lambda model: model.merge_adapter(), 0, None),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), 0, None),
    "another adapter": (other_adapter, 2, None),
    "two adapters": (both_adapters, 0, "it has 2 active adapters, not one"),
    "scale": (set_scale, 2, None),
    "weight": (set_weight, 2, None),
    "dropout": (set_dropout, 1, "its adapter has a dropout of 1.0"),
    "base": (set_base, 1, "its base_layer is a Sequential, not a torch.nn.Linear"),
    "forward": (set_forward, 1, "its base_layer has a forward of its own"),
    "hook of the base": (hooked(lambda m: first(m).base_layer), 1, "its base_layer has hooks"),
    "hook of A": (hooked(lambda m: first(m).lora_A["default"]), 1, "its lora_A has hooks"),
    "hook of B": (hooked(lambda m: first(m).lora_B["default"]), 1, "its lora_B has hooks"),
    "hook of the dropout": (
        hooked(lambda m: first(m).lora_dropout["default"]), 1, "its dropout has hooks"
    ),
    "hook of the layer": (hooked(first), 2, None),
    "scale with a gradient": (learn_scale, 1, "its scaling is a Parameter, not a number"),
    "bias": (add_bias, 1, f"{WHAT} whose adapter default has a bias"),
    "type of A": (set_type, 1, f"{WHAT} whose adapter default has a Scaled"),
    "forward of A": (
        set_own("forward", lambda m: first(m).lora_A["default"]), 1,
        "its lora_A has a forward of its own",
    ),
    "cast": (
        set_own("_cast_input_dtype", first), 1, "the instance has a _cast_input_dtype of its own"
    ),
    "class": (set_class_of(first), 2, None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "calls", "warning"), CHANGES.values(), ids=CHANGES)
def test_later_changes(change: Callable[[Any], Any], calls: int, warning: str | None) -> None:
    model, fused = adapted(), adapted(True)
    for one in (model, fused):
        change(one)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(fused, model)
    said = [str(one.message) for one in caught if "liger_ops" in str(one.message)]
    if warning is None:
        assert not said
    else:
        assert said and all(text.endswith(warning) for text in said)
        assert len(said) == (2 if "adapters" in warning else 1)
    assert calls_of(fused) == calls


def test_a_compiled_model_follows_changes() -> None:
    model, fused = adapted(), adapted(True)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(fused, fullgraph=True, backend=recorder.backend())
    assert_same(compiled, model)
    assert liger_ops_of(recorder.forwards) == {"lora_linear_forward": 2}
    for change in (set_scale, set_dropout, lambda m: m.merge_adapter()):
        for one in (model, fused):
            change(one)
        assert_same(compiled, model)
    assert liger_ops_of(recorder.forwards[-2:]) == {"lora_linear_forward": 1}


@pytest.mark.parametrize(
    "change", (set_own("forward", lambda m: first(m).lora_A["default"]), learn_scale)
)
def test_a_compiled_layer_runs_its_own_code_after_a_change(change: Callable[[Any], Any]) -> None:
    model, fused = adapted(), adapted(True)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert_same(compiled, model)
    for one in (model, fused):
        change(one)
    assert_same(compiled, model)


@pytest.mark.parametrize("cls", (nn.Linear, peft.tuners.lora.layer.Linear))
def test_a_method_that_is_replaced_in_a_class(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = adapted(), adapted(True)
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args: 1.5 * original(self, *args))
    with pytest.warns(UserWarning, match="has another forward"):
        assert_same(fused, model)


def test_back_and_forth() -> None:
    model, fused = adapted(), adapted(True)
    with model.disable_adapter(), fused.disable_adapter():
        assert_same(fused, model)
    for one in (model, fused):
        one.merge_adapter()
        one.unmerge_adapter()
    assert_same(fused, model)
    assert calls_of(fused) == 2
    x = torch.randn(4, 6)
    for one in (model, fused):
        second_adapter(one)
        one.eval()
    names = ["default", "other", "__base__", "default"]
    torch.testing.assert_close(fused(x, adapter_names=names), model(x, adapter_names=names))
    merged = fused.merge_and_unload()
    assert type(merged.first) is nn.Linear
    torch.testing.assert_close(merged(x), model.merge_and_unload()(x))


class MLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 10, bias=False), nn.Linear(6, 10)
        self.down_proj, self.act_fn = nn.Linear(10, 6), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def adapted_mlp(fused: bool, *names: str, act: nn.Module | None = None) -> Any:
    targets = [f"{name}_proj" for name in names]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
        model = peft.get_peft_model(nn.Sequential(MLP(act or nn.SiLU())), config)
    if fused:
        assert len(fuse(model, lora=True)) == 1 + len(names)
    return model


def ops_of(model: nn.Module) -> dict[str, int]:
    return dict(called(model, torch.ones(2, 6))[1])


PROJECTIONS = ("gate", "up", "down")


@pytest.mark.parametrize(
    "act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")], ids=["silu", "gelu", "gelu_tanh"]
)
def test_the_activation_is_in_the_op_of_the_last_projection(act: nn.Module) -> None:
    model, fused = (
        adapted_mlp(False, *PROJECTIONS, act=act),
        adapted_mlp(True, *PROJECTIONS, act=act),
    )
    assert_same(fused, model)
    assert_same(pickle.loads(pickle.dumps(fused)), model)
    assert ops_of(fused) == {"lora_linear_forward": 3}
    torch._dynamo.reset()
    recorder = Recorder()
    assert_same(torch.compile(fused, fullgraph=True, backend=recorder.backend()), model)
    assert liger_ops_of(recorder.forwards) == {"lora_linear_forward": 3}
    with model.disable_adapter(), fused.disable_adapter():
        assert_same(fused, model)
        assert len(ops_of(fused)) == 1 and "lora_linear_forward" not in ops_of(fused)
    assert unfuse(fused) == 4 and not ops_of(fused)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("down",), {"lora_linear_forward": 1}),
        (("gate", "up"), {"lora_linear_forward": 2, "swiglu": 1}),
    ],
)
def test_some_projections_have_a_lora(names: tuple[str, ...], expected: dict[str, int]) -> None:
    model, fused = adapted_mlp(False, *names), adapted_mlp(True, *names)
    assert_same(fused, model)
    assert ops_of(fused) == expected


def kept(model: nn.Module, x: Tensor) -> int:
    """The bytes that a call keeps beside parameters and x."""
    return saved_bytes(lambda: model(x), (x, *model.parameters()))


def test_an_mlp_keeps_gate_and_up_alone() -> None:
    """And a row of two numbers a layer."""
    x = torch.randn(7, 6, requires_grad=True)
    gate_and_up, rows = 2 * 7 * 10 * 4, 3 * 7 * 2 * 4
    assert kept(adapted_mlp(True, *PROJECTIONS), x) == gate_and_up + rows
    assert kept(adapted_mlp(False, *PROJECTIONS), x) == 2 * gate_and_up + rows


def down(model: Any) -> Any:
    return model.base_model.model[0].down_proj


MLP_CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": hooked(down),
    "hook of A": hooked(lambda model: down(model).lora_A["default"]),
    "forward": lambda model: setattr(down(model), "forward", lambda x: x[..., :6] * 2),
    "dropout": lambda model: down(model).lora_dropout.update({"default": nn.Dropout(1.0)}),
    "activation": lambda model: setattr(model.base_model.model[0], "act_fn", nn.Tanh()),
    "projection": lambda model: setattr(model.base_model.model[0], "down_proj", nn.Identity()),
    "class": set_class_of(down),
    "hook of the gate": hooked(lambda model: model.base_model.model[0].gate_proj),
}


@pytest.mark.filterwarnings("ignore:liger_ops")
@pytest.mark.parametrize("change", MLP_CHANGES.values(), ids=MLP_CHANGES)
def test_later_changes_of_an_mlp(change: Callable[[Any], Any]) -> None:
    model, fused = (adapted_mlp(fused, *PROJECTIONS) for fused in (False, True))
    for one in (model, fused):
        change(one)
    assert_same(fused, model)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_an_mlp_under_autocast(dtype: torch.dtype) -> None:
    model, fused = (adapted_mlp(fused, *PROJECTIONS).to(dtype) for fused in (False, True))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    truth = step(copy.deepcopy(model).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(fused, x), step(model, x)
        assert ops_of(fused) == {"lora_linear_forward": 3}
    for a, b, exact in zip(found, expected, truth, strict=True):
        assert a.dtype is b.dtype
        error, own = (float((one.double() - exact).abs().max()) for one in (a, b))
        assert error <= 2 * own + torch.finfo(torch.bfloat16).eps * float(exact.abs().max())


def test_a_wider_gate_is_not_rounded_before_the_activation() -> None:
    """Autocast casts what the last projection is given, and not gate and up."""
    model, fused = (adapted_mlp(fused, *PROJECTIONS) for fused in (False, True))
    for one in (model, fused):
        for name in ("gate_proj", "up_proj"):
            part = getattr(one.base_model.model[0], name)
            part.register_forward_hook(lambda module, args, y: y.float() * 1.001)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_of(fused) == {"lora_linear_forward": 3, "swiglu": 1}
        torch.testing.assert_close(fused(x), model(x), rtol=2e-2, atol=2e-2)
