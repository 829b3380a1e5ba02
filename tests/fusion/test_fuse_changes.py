"""The changes that `fuse` makes to a model, its report, and everything that it leaves unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fused_families import Family, output
from fused_models import FAMILY, LLAMA, fused_modules, results
from liger_ops.fusion import FuseReport, fuse, unfuse


@FAMILY
def test_parameters_are_the_same_objects(family: Family) -> None:
    model = family.model()
    first = next(module for module in model.modules() if "Norm" in type(module).__name__)
    first.requires_grad_(False)
    before, flags = dict(model.named_parameters()), {}
    for name, parameter in before.items():
        flags[name] = parameter.requires_grad
    state = copy.deepcopy(model.state_dict())
    assert fuse(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert {name: parameter.requires_grad for name, parameter in after.items()} == flags
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_module_in_two_places_stays_one() -> None:
    norm, other = nn.LayerNorm(8), nn.LayerNorm(8)
    other.weight = norm.weight
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "tied": other})
    assert len(fuse(model)) == 2
    assert model["a"] is model["b"][0]
    assert model["a"] is not model["tied"]
    assert model["a"].weight is model["tied"].weight
    unfuse(model)
    assert model["a"] is model["b"][0] is norm
    assert model["tied"] is other


def test_training_mode_is_kept() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    model[0].eval()
    fuse(model)
    assert [module.training for module in model] == [False, True]


def test_only_the_given_model_changes() -> None:
    one, two = LLAMA.model(), LLAMA.model()
    x = LLAMA.inputs(torch.float32)
    before = output(two, x)
    classes = {name: type(module) for name, module in two.named_modules()}
    forward = transformers.models.llama.modeling_llama.LlamaRMSNorm.forward
    assert fuse(one)
    assert {name: type(module) for name, module in two.named_modules()} == classes
    assert transformers.models.llama.modeling_llama.LlamaRMSNorm.forward is forward
    assert torch.equal(output(two, x), before)
    assert not fused_modules(LLAMA.model())


def test_second_call_replaces_nothing() -> None:
    model = LLAMA.model()
    assert len(fuse(model)) == 10
    modules = dict(model.named_modules())
    report = fuse(model, attention=False)
    assert not report
    assert report == FuseReport()
    assert all(module is modules[name] for name, module in model.named_modules())


def test_random_state_and_global_modes_are_kept() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(())

    model = nn.Sequential(nn.LayerNorm(8), nn.Dropout(), nn.RMSNorm(8, eps=1e-6), Drawing())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    report = fuse(model)
    assert len(report) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_under_another_mode(mode: Callable[[], Any]) -> None:
    model = LLAMA.model()
    with mode(), torch.device("meta"):
        assert len(fuse(model)) == 10
    x = LLAMA.inputs(torch.float32)
    assert results(model, x).keys() == results(LLAMA.model(), x).keys()


def test_report_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    layers = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8), LlamaRMSNorm(8)])
    model = nn.ModuleDict({"layers": layers, "norm": nn.RMSNorm(8)})
    report = fuse(model)
    assert len(report) == 3
    assert str(report).splitlines() == [
        "3 ops used",
        "  2 x layer_norm(eps=1e-05): LayerNorm",
        "      layers.*",
        "  1 x rms_norm(eps=1e-06, offset=0.0, casting_mode='llama'): LlamaRMSNorm",
        "      layers.2",
        "1 place left",
        "  1 x RMSNorm: rms_norm: eps=None is the dtype's own epsilon, which the op does not",
        "      support",
        "      norm",
    ]
    assert report.counts() == {"layer_norm": 2, "rms_norm": 1}
    nothing = str(fuse(nn.Linear(2, 2), rope=False)).splitlines()
    assert nothing[0] == "0 ops used"
    assert nothing[1] == "  looked for: norms, activations, attention, loss, hyper_connections"
    assert "liger_ops.explain(model, *inputs)" in nothing[2]


def test_a_norm_by_itself_is_left() -> None:
    report = fuse(nn.LayerNorm(8))
    assert not report
    assert "it is the model itself" in report.left[0].reason


@pytest.mark.parametrize("function", [fuse, unfuse])
def test_needs_a_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        function([nn.LayerNorm(8)])
