"""`fuse` and `unfuse`: on models of transformers, and on norms that are nearly an op."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import liger_ops.lowering.npu
import liger_ops.nn
import simulated_npu
from families import FAMILIES, Family, output
from graphs import Recorder, liger_ops_of
from liger_ops.fusion import FuseReport, classes, fuse, unfuse

FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
BY_NAME = {family.name: family for family in FAMILIES}
LLAMA, GEMMA3 = BY_NAME["Llama"], BY_NAME["Gemma3"]
GPT_OSS, QWEN3_MOE = BY_NAME["GptOss"], BY_NAME["Qwen3Moe"]
FUSED = (liger_ops.nn.RMSNorm, liger_ops.nn.LayerNorm, liger_ops.nn.GroupNorm)


def fused_modules(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, FUSED) or classes.overrides(module)
    ]


def gradient_of(y: Tensor) -> Tensor:
    """Random numbers that every dtype holds."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return dy.bfloat16().to(y.dtype)


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter for one random gradient of the output."""
    model.zero_grad()
    y = output(model, x)
    y.backward(gradient_of(y))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "output": y.detach(),
        **{name: grad for name, grad in grads.items() if grad is not None},
    }


# Families


@FAMILY
def test_every_part_is_fused(family: Family) -> None:
    model = family.model()
    report = fuse(model)
    assert Counter(entry.op for entry in report.fused) == family.parts
    assert not report.left
    assert len(fused_modules(model)) == len(report) == sum(family.parts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@FAMILY
def test_results_are_as_near_to_truth_as_before(family: Family, dtype: torch.dtype) -> None:
    """Output and every gradient, against the untouched model in float64 with the same weights.

    The fused model rounds where the untouched one does forward, and less often backward, but sums
    in another order: its error is held to twice the untouched model's and one more rounding to the
    dtype, each as a norm over the tensor. A gradient that is zero but for rounding, such as that of
    a key's bias, is measured against a thousandth of the gradient of the whole model.
    """
    untouched = family.model().to(dtype)
    fused = copy.deepcopy(untouched)
    assert fuse(fused)
    truth = results(copy.deepcopy(untouched).double(), family.inputs(torch.float64))
    before = results(untouched, family.inputs(dtype))
    after = results(fused, family.inputs(dtype))
    assert after.keys() == before.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "output"]).norm()
    for name, true in truth.items():
        assert after[name].dtype is dtype
        scale = max(true.norm(), 1e-3 * whole)
        error_before = ((before[name].double() - true).norm() / scale).item()
        error_after = ((after[name].double() - true).norm() / scale).item()
        bound = 2 * error_before + torch.finfo(dtype).eps
        assert error_after <= bound, (
            f"{name}: {error_after:.2e} from truth after, {error_before:.2e} before"
        )


@FAMILY
def test_compiles_whole(family: Family) -> None:
    """One graph, in which every op is one node forward and one backward; results as eager."""
    model = family.model()
    fuse(model)
    x = family.inputs(torch.float32)
    eager = results(model, x)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(model, fullgraph=True, backend=recorder.backend())
    y = output(compiled, x)
    model.zero_grad()
    y.backward(gradient_of(y))
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert liger_ops_of(recorder.forwards) == family.ops
    backward = {f"{op}_backward": count for op, count in family.ops.items()}
    assert liger_ops_of(recorder.backwards) == backward
    torch.testing.assert_close(y, eager["output"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-4)


def test_a_layer_compiles_once_for_all_sizes() -> None:
    model = LLAMA.model()
    fuse(model)
    layer = model.model.layers[0]
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=recorder.backend())
    for B, S in ((2, 7), (3, 11)):
        x = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(1))
        tables = model.model.rotary_emb(x, torch.arange(S)[None].expand(B, -1))
        y = compiled(x, position_embeddings=tables)
        torch.testing.assert_close(y, layer(x, position_embeddings=tables))
    assert liger_ops_of(recorder.forwards) == {"rms_norm": 2, "rope": 1, "swiglu": 1}


@FAMILY
def test_unfuse_restores_the_model(family: Family) -> None:
    model = family.model()
    classes = {name: type(module) for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    x = family.inputs(torch.float32)
    before = output(model, x)
    count = len(fuse(model))
    model.eval()
    assert unfuse(model) == count
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert all(module is modules[name] for name, module in model.named_modules())
    assert not any(module.training for module in model.modules())
    assert torch.equal(output(model.train(), x), before)
    assert unfuse(model) == 0


# What the rest of the world sees


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
    report = fuse(model)
    assert not report
    assert report == FuseReport((), ())
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


def test_deepcopy_and_pickle() -> None:
    model = LLAMA.model()
    count = len(fuse(model))
    x = LLAMA.inputs(torch.float32)
    expected = output(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(fused_modules(copied)) == count
        assert torch.equal(output(copied, x), expected)
        ours = {id(parameter) for parameter in model.parameters()}
        assert ours.isdisjoint(id(parameter) for parameter in copied.parameters())
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2)
        changed = output(copied, x)
        assert unfuse(copied) == count
        torch.testing.assert_close(output(copied, x), changed)
        assert not fused_modules(copied)
    assert torch.equal(output(model, x), expected)


def test_cast_after_fuse() -> None:
    model, untouched = LLAMA.model(), LLAMA.model().to(torch.bfloat16)
    fuse(model)
    model.to(torch.bfloat16)
    x = LLAMA.inputs(torch.bfloat16)
    fused_output = output(model, x)
    assert fused_output.dtype is torch.bfloat16
    cast_first = copy.deepcopy(untouched)
    fuse(cast_first)
    assert torch.equal(fused_output, output(cast_first, x))
    unfuse(model)
    assert torch.equal(output(model, x), output(untouched, x))


@pytest.mark.parametrize("assign", [False, True])
def test_load_after_fuse(assign: bool) -> None:
    """The values loaded are those that unfuse puts back, whether copied or assigned."""
    model, other = LLAMA.model(), LLAMA.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fuse(model)
    model.load_state_dict(other.state_dict(), assign=assign)
    x = LLAMA.inputs(torch.float32)
    torch.testing.assert_close(output(model, x), output(other, x))
    parameters = dict(model.named_parameters())
    unfuse(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(output(model, x), output(other, x))


def test_model_made_on_meta() -> None:
    with torch.device("meta"):
        model = LLAMA.build()
    assert len(fuse(model)) == 10
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(LLAMA.model().state_dict(), assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    unfuse(model)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_save_pretrained(tmp_path: Path) -> None:
    model = LLAMA.model()
    fuse(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    assert not fused_modules(loaded)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("family", [LLAMA, GPT_OSS], ids=lambda family: family.name)
def test_saved_whole(family: Family, tmp_path: Path) -> None:
    model = family.model()
    count = len(fuse(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = family.inputs(torch.float32)
    assert torch.equal(output(loaded, x), output(model, x))
    assert not fuse(loaded)
    assert unfuse(loaded) == count
    assert {type(module) for module in loaded.modules()} == {
        type(module) for module in family.model().modules()
    }


def test_replicas() -> None:
    """What DataParallel makes of a module on each device."""
    model = LLAMA.model()
    fuse(model)
    mlp = model.model.layers[0].mlp
    replica = mlp._replicate_for_data_parallel()
    x = torch.randn(2, 32)
    assert type(replica) is type(mlp)
    assert torch.equal(replica(x), mlp(x))


def test_two_models_compiled_in_one_process() -> None:
    """What torch.compile keeps of a fused layer does not serve an untouched one, and back."""
    fused, untouched = LLAMA.model(), LLAMA.model()
    fuse(fused)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(
        lambda mlp, x: mlp(x), fullgraph=True, backend=recorder.backend(), dynamic=False
    )
    graphs = []
    for model in (fused, untouched, fused, untouched):
        mlp = model.model.layers[0].mlp
        torch.testing.assert_close(compiled(mlp, x), mlp(x))
        graphs.append(len(recorder.forwards))
    assert graphs == [1, 2, 2, 2]
    assert [liger_ops_of([graph]) for graph in recorder.forwards] == [{"swiglu": 1}, {}]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", [LLAMA, GEMMA3, GPT_OSS], ids=lambda family: family.name)
def test_gradient_checkpointing(family: Family) -> None:
    model = family.model()
    fuse(model)
    x = family.inputs(torch.float32)
    expected = results(model, x)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(results(model, x), expected)
    assert len(calls) == 2


def test_autocast() -> None:
    """In autocast tables are float32 and queries bfloat16: rope is left to the model's function."""
    model, untouched = LLAMA.model(), LLAMA.model()
    fuse(model)
    x = LLAMA.inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = output(model, x), output(untouched, x)
    assert y.dtype is expected.dtype
    truth = output(untouched, x)
    error, error_before = ((part.float() - truth).norm() for part in (y, expected))
    assert error <= 2 * error_before


def test_generation_and_recorded_outputs() -> None:
    """A cache of keys, and attentions and hidden states, which transformers records by class."""
    model, untouched = LLAMA.model().eval(), LLAMA.model().eval()
    fuse(model)
    x = LLAMA.inputs(torch.float32)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(x, **options), untouched.generate(x, **options))
    wanted = {"output_attentions": True, "output_hidden_states": True}
    y, expected = model(x, **wanted), untouched(x, **wanted)
    torch.testing.assert_close(y.attentions, expected.attentions)
    torch.testing.assert_close(y.hidden_states, expected.hidden_states)
    assert len(y.attentions) == 2


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", [GPT_OSS, QWEN3_MOE], ids=lambda family: family.name)
def test_experts_implementations(family: Family, implementation: str) -> None:
    model, untouched = family.model(), family.model()
    model.set_experts_implementation(implementation)
    untouched.set_experts_implementation(implementation)
    report = fuse(model)
    # Qwen's eager forward has the activation in it.
    has_activation = family is GPT_OSS or implementation != "eager"
    assert len(report) == sum(family.parts.values()) - (0 if has_activation else 2)
    assert len(report.left) == (0 if has_activation else 2)
    x = family.inputs(torch.float32)
    expected = results(untouched, x)
    found = results(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_on_the_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    model = LLAMA.model()
    fuse(model)
    x = LLAMA.inputs(torch.float32)
    expected = output(model, x)
    simulated_npu.forget()
    y = output(model.to("npu"), simulated_npu.to_npu(x))
    modules = {name.rpartition(".")[0] for name in simulated_npu.launched}
    simulated_npu.forget()
    assert modules == {f"liger_ops.lowering.npu.{file}" for file in ("rms_norm", "gated", "rope")}
    torch.testing.assert_close(simulated_npu.to_cpu(y), expected, rtol=1e-4, atol=1e-4)


def test_fast_path_of_torch_transformer() -> None:
    """nn.TransformerEncoderLayer reads its norms' attributes; in evaluation it never calls them."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    before = [layer.train()(x), layer.eval()(x)]
    assert len(fuse(layer)) == 2
    torch.testing.assert_close([layer.train()(x), layer.eval()(x)], before)


# The report and bad arguments


def test_report_is_a_table() -> None:
    model = nn.ModuleDict(
        {"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": LlamaRMSNorm(8), "norm": nn.RMSNorm(8)}
    )
    report = fuse(model)
    assert len(report) == 3
    assert str(report).splitlines() == [
        "3 norms fused",
        "  2 x LayerNorm -> layer_norm(eps=1e-05)  a, ...",
        "  1 x LlamaRMSNorm -> rms_norm(eps=1e-06, offset=0.0, casting_mode='llama')  c",
        "1 left",
        "  1 x RMSNorm: as rms_norm its eps would be 1.19e-07, which is none of its attributes and"
        " no round number  norm",
    ]
    assert str(fuse(nn.Linear(2, 2))) == "nothing fused"


def test_a_norm_by_itself_is_left() -> None:
    report = fuse(nn.LayerNorm(8))
    assert not report
    assert "it is the model itself" in report.left[0].reason


@pytest.mark.parametrize("function", [fuse, unfuse])
def test_needs_a_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        function([nn.LayerNorm(8)])
