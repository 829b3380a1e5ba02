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
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import liger_ops.nn
from families import FAMILIES, Family, output
from graphs import Recorder, liger_ops_of
from liger_ops import fusion
from liger_ops.fusion import FuseReport, fuse, unfuse

FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
LLAMA = FAMILIES[0]
FUSED = (liger_ops.nn.RMSNorm, liger_ops.nn.LayerNorm, liger_ops.nn.GroupNorm)


def fused_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FUSED)]


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
def test_every_norm_is_replaced(family: Family) -> None:
    model = family.model()
    report = fuse(model)
    assert Counter(entry.op for entry in report.fused) == family.norms
    assert not report.left
    assert len(fused_modules(model)) == len(report) == sum(family.norms.values())


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
    """One graph, in which every norm is one node forward and one backward; results as eager."""
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
    assert liger_ops_of(recorder.forwards) == family.norms
    backward = {f"{op}_backward": count for op, count in family.norms.items()}
    assert liger_ops_of(recorder.backwards) == backward
    torch.testing.assert_close(y, eager["output"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-4)


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
    assert len(fuse(model)) == 5
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
        assert len(fuse(model)) == 5
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
    torch.testing.assert_close(fused_output, output(untouched, x))
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
    assert len(fuse(model)) == 5
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(LLAMA.model().state_dict(), assign=True)
    assert not any(module.weight.is_meta for module in fused_modules(model))
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


def test_fast_path_of_torch_transformer() -> None:
    """nn.TransformerEncoderLayer reads its norms' attributes; in evaluation it never calls them."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    before = [layer.train()(x), layer.eval()(x)]
    assert len(fuse(layer)) == 2
    torch.testing.assert_close([layer.train()(x), layer.eval()(x)], before)


# What a norm computes


class Rms(nn.Module):
    """A norm whose class name says nothing. The other norms here change one thing of it."""

    def __init__(self, size: int = 24, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.small = eps

    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalised(x.float()).to(x.dtype)


class GemmaStyle(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalised(x.float()) * (1.0 + self.weight.float())).type_as(x)


class OneRounding(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalised(x.float()) * self.weight.float()).type_as(x)


class NeverWidened(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalised(x) * self.weight


class Weightless(nn.Module):
    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.mean:
            return F.layer_norm(wide, x.shape[-1:]).to(x.dtype)
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + 3e-5) ** -0.5).to(x.dtype)


class FixedWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (24,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, eps=1e-5).to(x.dtype)


def rms_options(eps: float, offset: float, casting_mode: str) -> dict[str, Any]:
    return {"eps": eps, "offset": offset, "casting_mode": casting_mode}


COMPUTES = [
    (Rms(), "rms_norm", rms_options(1e-6, 0.0, "llama")),
    (Rms(1), "rms_norm", rms_options(1e-6, 0.0, "llama")),
    (Rms(5000, eps=1e-12), "rms_norm", rms_options(1e-12, 0.0, "llama")),
    (Rms(eps=1.5625e-07), "rms_norm", rms_options(1.5625e-07, 0.0, "llama")),
    (Rms(eps=0.01), "rms_norm", rms_options(0.01, 0.0, "llama")),
    (GemmaStyle(), "rms_norm", rms_options(1e-6, 1.0, "gemma")),
    (OneRounding(), "rms_norm", rms_options(1e-6, 0.0, "gemma")),
    (NeverWidened(), "rms_norm", rms_options(1e-6, 0.0, "none")),
    (NeverWidened(4096), "rms_norm", rms_options(1e-6, 0.0, "none")),
    (Weightless(), "rms_norm", rms_options(3e-5, 0.0, "llama")),
    (Weightless(mean=True), "layer_norm", {"eps": 1e-5}),
    (FixedWidth(), "layer_norm", {"eps": 1e-5}),
    (nn.RMSNorm(24, eps=1e-5), "rms_norm", rms_options(1e-5, 0.0, "gemma")),
    (nn.LayerNorm(24), "layer_norm", {"eps": 1e-5}),
    (nn.LayerNorm(24, bias=False), "layer_norm", {"eps": 1e-5}),
    (nn.LayerNorm(24, elementwise_affine=False), "layer_norm", {"eps": 1e-5}),
    (nn.GroupNorm(4, 24, eps=1e-3), "group_norm", {"eps": 1e-3, "num_groups": 4}),
    (nn.GroupNorm(24, 24), "group_norm", {"eps": 1e-5, "num_groups": 24}),
    (nn.GroupNorm(1, 24, affine=False), "group_norm", {"eps": 1e-5, "num_groups": 1}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("module", "op", "options"),
    COMPUTES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _, _) in enumerate(COMPUTES)],
)
def test_options_are_found(
    module: nn.Module, op: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = nn.Sequential(copy.deepcopy(module)).to(dtype)
    report = fuse(model)
    assert [(entry.op, entry.options) for entry in report.fused] == [(op, options)]
    assert (model[0].eps, model[0].weight is None) == (
        options["eps"],
        getattr(module, "weight", None) is None,
    )
    width = 24 if getattr(module, "weight", None) is None else module.weight.numel()
    shape = (3, width, 5) if op == "group_norm" else (3, 5, width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    original = copy.deepcopy(module).to(dtype)
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(model(x), original(x), rtol=rtol, atol=atol)


class Gated(Rms):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * F.silu(gate)


class FirstDimension(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.small)


class Scaled(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class ScaleParameter(Rms):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))


class EpsOutside(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.small)


class Clamped(Rms):
    """Zeros stay zeros, where an eps of 0 would make NaN of them."""

    def normalised(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class Unbiased(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class OffsetLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RoundedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, eps=self.eps) * self.weight + self.bias


class StoppedGradient(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small).detach()


class TrainsOtherwise(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class ReturnsFloat32(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * self.normalised(x.float())


class ReturnsPair(Rms):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class DtypeEps(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        self.small = 1e-6 if self.weight.dtype is torch.float32 else 1e-3
        return super().normalised(x)


class OwnState(Rms):
    def get_extra_state(self) -> Any:
        return self.small


class ImageNorm(nn.LayerNorm):
    """Normalises the second dimension where there are four, the last where there are not."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, y: y + 1)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


def with_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("count", torch.zeros(1))
    return module


class Strange(nn.Parameter):
    pass


def with_strange_parameter(module: nn.Module) -> nn.Module:
    module.weight = Strange(torch.ones(24))
    return module


def compiled(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def parametrized(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Halved())
    return module


NO_NORM = "it computes none of rms_norm, layer_norm and group_norm in float32"
NOT_LIKE = "it is no norm over the last dimension or over groups of channels"

# Modules, each one thing away from an op, and what the report must say of it.
NEAR_MISSES = [
    (Gated(), "its forward takes (x, gate=None)"),
    (FirstDimension(), "as rms_norm its eps would be"),
    (Scaled(), NO_NORM),
    (ScaleParameter(), "it has other parameters than weight and bias: scale"),
    (EpsOutside(), NO_NORM),
    (Clamped(), NO_NORM),
    (Unbiased(24), "as layer_norm its eps would be 9.58e-06, which is none"),
    (OffsetLayerNorm(24), NO_NORM),
    (RoundedLayerNorm(24), "values of layer_norm in float32 but rounds elsewhere"),
    (StoppedGradient(), "another gradient"),
    (TrainsOtherwise(), NO_NORM),
    (ReturnsFloat32(), "it returns float32 for input of bfloat16"),
    (ReturnsPair(), "it returns tuple, not a tensor"),
    (DtypeEps(), "rounds elsewhere in lower precision"),
    (OwnState(), "its class overrides get_extra_state"),
    (ImageNorm(24), "it fails on the CPU (float32, 4 dimensions)"),
    (nn.RMSNorm(24), "as rms_norm its eps would be 1.19e-07, which is none"),
    (hooked(Rms()), "it has hooks"),
    (with_own_forward(Rms()), "the instance has a forward of its own"),
    (with_buffer(Rms()), "it has buffers: count"),
    (with_strange_parameter(Rms()), "weight is a Strange, not a plain Parameter"),
    (compiled(Rms()), "it is compiled by itself"),
    (parametrized(Rms()), "it is parametrized"),
    (parametrizations.spectral_norm(nn.LayerNorm(24), dim=0), "it is parametrized"),
    (nn.LayerNorm((3, 8)), "its parameters have shapes [(3, 8)], not one size"),
    (nn.BatchNorm1d(24), "it has buffers: running_mean"),
    (nn.BatchNorm1d(24, track_running_stats=False), "it has buffers"),
    (nn.InstanceNorm1d(24), "it has buffers"),
    (nn.LocalResponseNorm(2), "it fails on the CPU (float32)"),
    (nn.Identity(), NOT_LIKE),
    (nn.PReLU(24), NOT_LIKE),
]


@pytest.mark.parametrize(
    ("module", "reason"),
    NEAR_MISSES,
    ids=[f"{type(module).__name__}-{i}" for i, (module, _) in enumerate(NEAR_MISSES)],
)
def test_near_miss_is_left_with_the_reason(module: nn.Module, reason: str) -> None:
    model = nn.ModuleDict({"input_norm": module})
    report = fuse(model)
    assert not report
    assert model["input_norm"] is module
    assert [(entry.name, entry.class_name) for entry in report.left] == [
        ("input_norm", type(module).__name__)
    ]
    assert reason in report.left[0].reason
    assert reason in str(report)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_script_module_is_left() -> None:
    report = fuse(nn.ModuleDict({"norm": torch.jit.script(nn.LayerNorm(24))}))
    assert [entry.reason for entry in report.left] == ["it is a ScriptModule"]


def test_left_modules_that_no_one_calls_a_norm_are_not_reported() -> None:
    report = fuse(nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.PReLU(), nn.SiLU(), Scaled()))
    assert report == FuseReport((), ())


def test_class_name_decides_nothing() -> None:
    liar = type("LlamaRMSNorm", (Scaled,), {})()
    model = nn.ModuleDict({"norm": liar, "plain": Rms()})
    report = fuse(model)
    assert [entry.name for entry in report.fused] == ["plain"]
    assert [entry.name for entry in report.left] == ["norm"]


def test_weight_of_another_dtype_than_the_model() -> None:
    """A llama norm of float32 weight turns bfloat16 into float32, which no op does."""
    model = nn.ModuleDict(
        {"linear": nn.Linear(24, 24, dtype=torch.bfloat16), "norm": Rms(), "gemma": GemmaStyle()}
    )
    report = fuse(model)
    assert [entry.name for entry in report.fused] == ["gemma"]
    assert [entry.name for entry in report.left] == ["norm"]
    assert "it returns float32 for input of bfloat16" in report.left[0].reason
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = GemmaStyle()(x)
    torch.testing.assert_close(model["gemma"](x), expected, rtol=2**-7, atol=1e-5)


def test_equal_norms_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class, a size, a dtype and equal attributes; anything else is probed by itself."""
    probed = []
    probe = fusion.probe
    monkeypatch.setattr(
        fusion,
        "probe",
        lambda module, dtypes: probed.append(module) or probe(module, dtypes),
    )
    same = [Rms() for _ in range(100)]
    different = [Rms(16), Rms(eps=1e-5), OneRounding(), NeverWidened()]
    report = fuse(nn.Sequential(*same, *different))
    assert len(report) == 104
    assert len(probed) == 5
    assert [entry.options["eps"] for entry in report.fused[100:102]] == [1e-6, 1e-5]
    assert [entry.options["casting_mode"] for entry in report.fused[102:]] == ["gemma", "none"]


# The report and bad arguments


def test_report_is_a_table() -> None:
    model = nn.ModuleDict(
        {"a": nn.LayerNorm(8), "b": nn.LayerNorm(8), "c": Rms(), "norm": nn.RMSNorm(8)}
    )
    report = fuse(model)
    assert len(report) == 3
    assert str(report).splitlines() == [
        "3 norms fused",
        "  2 x LayerNorm -> layer_norm(eps=1e-05)  a, ...",
        "  1 x Rms -> rms_norm(eps=1e-06, offset=0.0, casting_mode='llama')  c",
        "1 left",
        "  1 x RMSNorm: as rms_norm its eps would be 1.19e-07, which is none of its attributes and"
        " no round number  norm",
    ]
    assert str(fuse(nn.Linear(2, 2))) == "no norms fused"


def test_a_norm_by_itself_is_left() -> None:
    report = fuse(nn.LayerNorm(8))
    assert not report
    assert "it is the model itself" in report.left[0].reason


@pytest.mark.parametrize("function", [fuse, unfuse])
def test_needs_a_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        function([nn.LayerNorm(8)])
