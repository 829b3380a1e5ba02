"""`fuse` on experts whose parameters peft adapts, by `target_parameters`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import small_configs
from called_ops import called
from graphs import Recorder, liger_ops_of
from liger_ops import fuse, unfuse
from liger_ops.integrations import transformers as by_name

peft = pytest.importorskip("peft", reason="the adapters are peft's")

BOTH = ("gate_up_proj", "down_proj")
EXPERTS = {"norms": False, "rope": False, "attention": False, "loss": False}
X = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def adapted(model_type: str = "qwen3_moe", targets: tuple[str, ...] = BOTH, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_configs.small(model_type))
    names = [f"mlp.experts.{name}" for name in targets]
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=[], target_parameters=names, init_lora_weights=False,
        **options,
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def wide(model: Any) -> Any:
    """The model in float64, for which grouped_mm has no products."""
    model.base_model.model.set_experts_implementation("eager")
    return model.double()


def fused_of(model: Any) -> Any:
    fused = copy.deepcopy(model)
    report = fuse(fused, **EXPERTS)
    assert report.counts()["moe_experts"] == 2
    assert not [entry for entry in report.left if "experts" in entry.where]
    return fused


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=X, labels=X).loss
    if loss.requires_grad:
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same(fused: Any, model: Any) -> None:
    torch.testing.assert_close(step(fused), step(model), rtol=1e-3, atol=2e-5)


def formed(model: Any) -> list[str]:
    """The parameters for which a step forms the weights with their LoRA."""
    names = []

    def noted(self: Any, adapters: list[str], original: Callable[..., Any] = WRAPPER) -> Any:
        names.append(self.parameter_name)
        return original(self, adapters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.lora.layer.ParamWrapper, "_activate_lora", noted)
        step(model)
    return names


WRAPPER = peft.tuners.lora.layer.ParamWrapper._activate_lora


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("qwen3_moe", BOTH), ("gpt_oss", BOTH), ("mixtral", BOTH), ("mixtral", BOTH[:1]),
        ("gpt_oss", BOTH[1:]),
    ],
)  # fmt: skip
def test_a_step_is_that_of_the_untouched_model(model_type: str, targets: tuple[str, ...]) -> None:
    """With the weights of an expert in rows or, as GPT-OSS's, in columns. No weight is formed with
    its LoRA, and no gradient of a frozen one."""
    model = adapted(model_type, targets)
    fused = fused_of(model)
    assert_same(fused, model)
    assert_same(fused.double(), wide(model))
    assert not formed(fused) and len(formed(model)) == 2 * len(targets)
    assert len(step(fused)[1]) == 4 * len(targets)
    # The experts, the wrappers of the same experts, and all else.
    before = unfuse(fused)
    assert before == len(fuse(fused, **EXPERTS)) + 2
    assert_same(fused, model)


def test_adapters_of_float32_on_weights_of_bfloat16() -> None:
    """As peft makes them by default. The error is at most that of the weights that peft forms."""
    model = adapted()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    fused = fused_of(model)
    truth = step(wide(copy.deepcopy(model)))[1]
    errors = []
    for one in (model, fused):
        found = step(one)[1]
        assert all(grad.dtype is torch.float32 for grad in found.values())
        errors.append([float((found[n] - truth[n]).norm() / truth[n].norm()) for n in truth])
    assert not formed(fused)
    assert all(b < 2 * a + 1e-2 for a, b in zip(*errors, strict=True))


def test_later_changes_of_adapters_are_noticed() -> None:
    model = adapted()
    try:
        model.add_adapter("other", copy.copy(model.peft_config["default"]))
    except ValueError as error:
        pytest.skip(f"peft 0.19 adds no second adapter to a parameter: {error}")
    fused = fused_of(model)
    for change in (
        lambda one: one.set_adapter("other"),
        lambda one: one.base_model.disable_adapter_layers(),
        lambda one: one.base_model.enable_adapter_layers(),
        lambda one: one.merge_adapter(),
        lambda one: one.unmerge_adapter(),
    ):
        for one in (model, fused):
            change(one)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="liger_ops")
            assert_same(fused, model)
    assert not formed(fused)
    for one in (model, fused):
        one.base_model.set_adapter(["default", "other"])
    reason = "runs its own code, .* down_proj has several active adapters: default, other"
    with pytest.warns(UserWarning, match=reason):
        step(fused)
    assert_same(fused, model)
    merged = [one.merge_and_unload() for one in (model, fused)]
    assert_same(*merged[::-1])


def wrapper_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp.experts


def hook(model: Any) -> None:
    experts = wrapper_of(model).get_base_layer()
    experts.register_forward_hook(lambda module, args, y: 2 * y)


def own_forward(model: Any) -> None:
    wrapper_of(model).forward = wrapper_of(model).forward


@pytest.mark.parametrize(
    ("model_type", "targets", "change", "reason"),
    [
        ("qwen3_moe", BOTH, hook, "Experts, which would not be called, has hooks"),
        ("qwen3_moe", BOTH, own_forward, "the instance has a forward of its own"),
        ("gpt_oss", ("down_proj_bias",), lambda model: None, "down_proj_bias has a LoRA"),
        (
            "qwen3_moe", BOTH, lambda model: setattr(wrapper_of(model), "num_experts", 1),
            "the LoRA of down_proj is not one of experts",
        ),
    ],
)  # fmt: skip
def test_what_is_left(
    model_type: str, targets: tuple[str, ...], change: Callable[[Any], None], reason: str
) -> None:
    """The experts are computed by the op, of weights that peft forms."""
    model = adapted(model_type, targets)
    change(model)
    report = fuse(model, **EXPERTS)
    assert report.counts()["moe_experts"] == 2
    left = next(entry for entry in report.left if entry.where.endswith("layers.0.mlp.experts"))
    assert "the weights are formed with their LoRA: " in left.reason and reason in left.reason


def test_a_lora_of_another_parameter_is_left() -> None:
    config = peft.LoraConfig(target_modules=[], target_parameters=["0.weight"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
    (left,) = fuse(model).left
    assert left.reason == "the weights are formed with their LoRA: its Linear is not fused"


def test_a_hook_that_is_set_later_is_called() -> None:
    model = adapted()
    fused = fused_of(model)
    for one in (model, fused):
        hook(one)
    with pytest.warns(UserWarning, match="Experts, which would not be called, has hooks"):
        assert_same(fused, model)


def set_scale(model: Any) -> None:
    wrapper_of(model).scaling["default"] = torch.tensor(1.7)


def double_lora(model: Any) -> None:
    wrapper = wrapper_of(model)
    factors = wrapper.get_delta_factors

    def doubled(name: str) -> Any:
        left, right, scale = factors(name)
        return left, right, 2 * scale

    wrapper.get_delta_factors = doubled


def square_weight(model: Any) -> None:
    experts = wrapper_of(model).get_base_layer()
    parametrize.register_parametrization(experts, "down_proj", Square())


class Square(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.square()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_scale, "the scaling of down_proj is not a number"),
        (double_lora, "a ParamWrapper has a get_delta_factors of its own"),
        (square_weight, "holds no Parameter down_proj"),
    ],
)
def test_later_changes_that_the_op_does_not_compute(
    change: Callable[[Any], None], reason: str
) -> None:
    model = adapted()
    if not hasattr(wrapper_of(model), "get_delta_factors"):
        pytest.skip("this version of peft forms weights in another way")
    fused = fused_of(model)
    for one in (model, fused):
        change(one)
    with pytest.warns(UserWarning, match=reason):
        assert_same(fused, model)


def test_a_compiled_layer_is_one_graph() -> None:
    layer = wrapper_of(fused_of(adapted()))
    index = torch.arange(14).remainder(4).reshape(7, 2)
    given = (torch.randn(7, layer.get_base_layer().down_proj.shape[1]), index, torch.rand(7, 2))
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=recorder.backend())
    y = compiled(*given)
    torch.testing.assert_close(y, layer(*given))
    y.sum().backward()
    assert liger_ops_of(recorder.forwards) == {"moe_experts_forward": 1}


def test_the_implementation_by_name_takes_the_weights_that_peft_forms() -> None:
    by_name.install()
    model = adapted()
    named = copy.deepcopy(model)
    named.base_model.model.set_experts_implementation("liger")
    assert_same(named, model)
    _, ops = called(named, input_ids=X)
    assert ops["moe_experts_forward"] == 2
    by_name.uninstall()
