"""Modules that `fuse` recognises as norms, and modules that are nearly norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from liger_ops import fuse
from liger_ops.fusion import FuseReport
from norm_modules import GemmaStyle, NeverWidened, OneRounding, Rms


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
    """Zeros stay zeros, while an eps of 0 would give NaN."""

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


class ByLength(Rms):
    """Another result for lengths, or batches, that `decides` is true of."""

    def __init__(self, decides: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.decides = decides

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.decides(x) else x


class OtherInFloat64(Rms):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 0.5 if x.dtype is torch.float64 else y


class StoppedGradient(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small).detach()


class StoppedWeight(Rms):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class WritesInAMode(Rms):
    """Doubles the mean square in another mode of autograd or autocast."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode

    def normalised(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        with self.mode():
            square.mul_(2.0)
        return x * torch.rsqrt(square + self.small)


class WritesIntoItsInput(Rms):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.zero_()
        return y


class Identically(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class OwnGradient(Rms):
    def normalised(self, x: Tensor) -> Tensor:
        return Identically.apply(x)


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


class ImageNorm(nn.LayerNorm):
    """Normalises the second of four dimensions, and otherwise the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


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


def parametrized(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Halved())
    return module


NO_NORM = "it computes none of rms_norm, layer_norm and group_norm"

OTHER_LENGTHS = "it computes something else for other lengths or batches"
DECISIONS: list[Callable[[Tensor], Any]] = [
    lambda x: x.shape[-2] > 6,
    lambda x: x.shape[0] != 1,
    lambda x: x.size(0) * 2 + 1 >= 3,
    lambda x: len(x) < 10**6,
    lambda x: x.numel() / x.shape[-1] > 2,
    lambda x: max(x.shape[:-1]) == 1,
    lambda x: int(x.shape[0]) - 1,
    lambda x: x.reshape(-1, 24).shape[0] % 2,
]

# Modules that each differ from an op in one thing, and a part of the reason in the report.
NEAR_MISSES = [
    (Gated(), "gated_rms_norm: its casts or sizes are not the op's"),
    (FirstDimension(), "rms_norm: mean has -3 where the op has -1"),
    (Scaled(), "it computes mul beside rms_norm"),
    (ScaleParameter(), "it has other parameters than weight and bias: scale"),
    (EpsOutside(), NO_NORM),
    (Clamped(), NO_NORM),
    (Unbiased(24), NO_NORM),
    (OffsetLayerNorm(24), "it computes add beside layer_norm"),
    (RoundedLayerNorm(24), "it computes mul beside layer_norm"),
    *((ByLength(one), OTHER_LENGTHS) for one in DECISIONS),
    (StoppedGradient(), NO_NORM),
    (StoppedWeight(), NO_NORM),
    (WritesInAMode(torch.enable_grad), NO_NORM),
    (WritesInAMode(torch.no_grad), NO_NORM),
    (WritesInAMode(lambda: torch.autocast("cpu", torch.bfloat16)), NO_NORM),
    (WritesIntoItsInput(), "it does more than compute its result: zero_"),
    (OwnGradient(), NO_NORM),
    (TrainsOtherwise(), "it computes dropout beside rms_norm"),
    (ReturnsFloat32(), "it returns float32 for input of bfloat16"),
    (ReturnsPair(), "it returns tuple, not a tensor"),
    (DtypeEps(), "its forward changes its attributes"),
    (ImageNorm(24), "it fails on fake tensors (float16, 4 dimensions, training)"),
    (nn.RMSNorm(24), "rms_norm: eps=None is the dtype's own epsilon"),
    (with_own_forward(Rms()), "the instance has a forward of its own"),
    (with_buffer(Rms()), "it has buffers: count"),
    (with_strange_parameter(Rms()), "weight is a Strange, not a plain Parameter"),
    (parametrized(Rms()), "it is parametrized"),
    (parametrizations.spectral_norm(nn.LayerNorm(24), dim=0), "it is parametrized"),
    (nn.LayerNorm((3, 8)), "its parameters have shapes [(3, 8)], not one size"),
    (nn.BatchNorm1d(24), "it has buffers: running_mean"),
    (nn.BatchNorm1d(24, track_running_stats=False), "it has buffers"),
    (nn.InstanceNorm1d(24), "it has buffers"),
    (nn.LocalResponseNorm(2), NO_NORM),
    (nn.Identity(), NO_NORM),
    (nn.PReLU(24), NO_NORM),
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
    assert [(entry.where, entry.class_name) for entry in report.left] == [
        ("input_norm", type(module).__name__)
    ]
    assert reason in report.left[0].reason
    assert reason in " ".join(str(report).split())


def test_a_norm_that_is_another_in_float64_runs_its_own_code_there() -> None:
    model = nn.Sequential(OtherInFloat64())
    assert len(fuse(model)) == 1
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), Rms()(x))
    assert torch.equal(model.double()(x.double()), OtherInFloat64().double()(x.double()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_script_module_is_left() -> None:
    report = fuse(nn.ModuleDict({"norm": torch.jit.script(nn.LayerNorm(24))}))
    assert [entry.reason for entry in report.left] == ["it is a ScriptModule"]


def test_left_modules_that_no_one_calls_a_norm_are_not_reported() -> None:
    report = fuse(nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.PReLU(), nn.SiLU(), Scaled()))
    assert report == FuseReport()


def test_class_name_decides_nothing() -> None:
    liar = type("LlamaRMSNorm", (Scaled,), {})()
    model = nn.ModuleDict({"norm": liar, "plain": Rms()})
    report = fuse(model)
    assert [entry.where for entry in report.fused] == ["plain"]
    assert [entry.where for entry in report.left] == ["norm"]


def test_weight_of_another_dtype_than_the_model() -> None:
    """A llama norm with float32 weight turns bfloat16 into float32, which no op does."""
    model = nn.ModuleDict(
        {"linear": nn.Linear(24, 24, dtype=torch.bfloat16), "norm": Rms(), "gemma": GemmaStyle()}
    )
    report = fuse(model)
    assert [entry.where for entry in report.fused] == ["gemma"]
    assert [entry.where for entry in report.left] == ["norm"]
    assert "it returns float32 for input of bfloat16" in report.left[0].reason
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = GemmaStyle()(x)
    torch.testing.assert_close(model["gemma"](x), expected, rtol=2**-7, atol=1e-5)
