"""torchtitan's overrides, in a stand-in of torchtitan's modules."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ranks

NAME = "liger_ops.integrations.torchtitan"
IGNORED = -100


class RMSNorm(nn.RMSNorm):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        normalized_shape: int
        eps: float = 1e-5
        sharding_config: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__(config.normalized_shape, eps=config.eps)


class FeedForward(nn.Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        w1: Any
        w2: Any
        w3: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*one) for one in (config.w1, config.w2, config.w3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        up = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.randn(up)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.randn(up).transpose(1, 2).contiguous())

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offsets = num_tokens_per_expert_E.cumsum(0)
        w1, w2, w3 = (w.bfloat16().transpose(1, 2) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        gate, up = (self._grouped_mm(A=x_RD.bfloat16(), B_t=w, offs=offsets) for w in (w1, w3))
        return self._grouped_mm(A=F.silu(gate) * up, B_t=w2, offs=offsets).type_as(x_RD)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        parts = A.tensor_split(offs[:-1].tolist())
        return torch.cat([rows @ weight for rows, weight in zip(parts, B_t, strict=True)])


def cross_entropy_loss(
    pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None
) -> Tensor:
    flat = pred.flatten(0, 1).float(), labels.flatten(0, 1)
    return F.cross_entropy(*flat, reduction="sum", ignore_index=IGNORED)


class CrossEntropyLoss:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        global_vocab_size: int | None = None

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        self.fn = cross_entropy_loss
        self.global_vocab_size = config.global_vocab_size
        self._maybe_compile(compile_config)

    def _maybe_compile(self, compile_config: Any) -> None:
        if compile_config is not None:
            self.fn = torch.compile(self.fn, backend=compile_config.backend)

    def __call__(self, pred: Tensor, labels: Tensor, tokens: Tensor) -> Any:
        return self.fn(pred, labels, global_vocab_size=self.global_vocab_size) / tokens, {}


@dataclasses.dataclass
class Spmd:
    """The state of torchtitan's backend `spmd_types` while it trains."""

    backend: str = "spmd_types"
    mesh: Any = None
    checks: bool = False


SPMD = Spmd()
REGISTERED: dict[str, tuple[type, bool]] = {}


def override(*, target: type, exact: bool, description: str) -> Any:
    def register(function: Any) -> Any:
        REGISTERED[function.__name__] = target, exact
        return function

    return register


def derive(source: Any, target: Any) -> Any:
    return target(**{one.name: getattr(source, one.name) for one in dataclasses.fields(source)})


MODULES: dict[str, dict[str, Any]] = {
    "torchtitan": {},
    "torchtitan.components": {
        "loss": SimpleNamespace(
            CrossEntropyLoss=CrossEntropyLoss,
            cross_entropy_loss=cross_entropy_loss,
            IGNORE_INDEX=IGNORED,
            spmd=SimpleNamespace(is_type_checking=lambda: SPMD.checks),
            spmd_mesh_size=lambda axis: 1 if SPMD.mesh is None else 2,
            current_spmd_mesh=lambda: SPMD.mesh,
        )
    },
    "torchtitan.config": {"override": override, "derive": derive},
    "torchtitan.distributed": {},
    "torchtitan.distributed.utils": {"get_spmd_backend": lambda: SPMD.backend},
    "torchtitan.models": {},
    "torchtitan.models.common": {"RMSNorm": RMSNorm},
    "torchtitan.models.common.feed_forward": {"FeedForward": FeedForward},
    "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts},
}


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def parameters(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def seeded(owner: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return owner(config)


def results(function: Any, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *parameters])]


def loss_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5, 37, generator=generator)
    labels = torch.randint(37, (2, 5), generator=generator)
    labels[0, :3] = IGNORED
    return logits, labels, torch.tensor(7.0)


@pytest.mark.parametrize(
    ("name", "owner", "config", "op"),
    [
        ("rms_norm", RMSNorm, RMSNorm.Config(normalized_shape=16, eps=1e-3), "rms_norm"),
        (
            "swiglu",
            FeedForward,
            FeedForward.Config(w1=(16, 24), w2=(24, 16), w3=(16, 24)),
            "swiglu",
        ),
    ],
)
def test_a_part_of_a_model(integration, name, owner, config, op, monkeypatch):
    derived = getattr(integration, name)(config)
    ours, theirs = (
        seeded(getattr(integration, f"Liger{owner.__name__}"), derived),
        seeded(owner, config),
    )
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    pairs = [results(one, x, list(one.parameters())) for one in (ours, theirs)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)
    with torch.profiler.profile() as profile:
        ours(x)
    calls = [event.key for event in profile.key_averages()]
    assert any(f"liger::{op}" in call for call in calls)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_loss(integration, backend):
    config = CrossEntropyLoss.Config()
    compiled = None if backend is None else SimpleNamespace(backend=backend)
    ours = integration.LigerCrossEntropyLoss(
        integration.cross_entropy(config), compile_config=compiled
    )
    logits, labels, tokens = loss_inputs()
    pairs = [
        results(lambda x, loss=loss: loss(x, labels, tokens)[0], logits, [])
        for loss in (ours, CrossEntropyLoss(config))
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_replaced(integration):
    """Not subclasses, whose forwards are their own."""
    registered = dict(REGISTERED)
    assert registered == {
        "rms_norm": (RMSNorm.Config, True),
        "swiglu": (FeedForward.Config, True),
        "grouped_experts": (GroupedExperts.Config, True),
        "cross_entropy": (CrossEntropyLoss.Config, True),
    }
    # torchtitan finds the sharding of an argument by its name.
    for owner in (RMSNorm, FeedForward, GroupedExperts):
        ours = getattr(integration, f"Liger{owner.__name__}")
        assert parameters(ours.forward).keys() == parameters(owner.forward).keys()


def test_the_activation_of_experts(integration, monkeypatch):
    config = GroupedExperts.Config(dim=16, hidden_dim=24, num_experts=3)
    ours = seeded(integration.LigerGroupedExperts, integration.grouped_experts(config))
    theirs = seeded(GroupedExperts, config)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 0, 7])
    pairs = [
        results(lambda x, one=one: one(x, tokens), x, list(one.parameters()))
        for one in (ours, theirs)
    ]
    for one, other in zip(*pairs, strict=True):
        # Products in bfloat16, and one rounding less.
        assert (one - other).norm() <= 1e-2 * other.norm()
    with torch.profiler.profile() as profile:
        ours(x, tokens)
    assert any("liger::swiglu" in event.key for event in profile.key_averages())
    monkeypatch.setattr(SPMD, "checks", True)
    assert torch.equal(ours(x, tokens), theirs(x, tokens))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_the_loss_of_sharded_words(integration, backend, mesh, monkeypatch):
    monkeypatch.setattr(SPMD, "backend", backend)
    monkeypatch.setattr(SPMD, "mesh", mesh if backend == "spmd_types" else None)
    logits, labels, tokens = loss_inputs()
    ours = integration.LigerCrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=37))

    def sharded(x: Tensor) -> Tensor:
        if backend == "partial_dtensor":
            x = DTensor.from_local(x, mesh, [Shard(2)])
        return ours(x, labels, tokens)[0]

    with ranks.Traffic() as traffic:
        found = results(sharded, logits, [])
    assert [name for name, _ in traffic.seen] == ["all_gather_into_tensor"]
    theirs = CrossEntropyLoss(CrossEntropyLoss.Config())
    for one, other in zip(
        found, results(lambda x: theirs(x, labels, tokens)[0], logits, []), strict=True
    ):
        torch.testing.assert_close(one, other)

    monkeypatch.setattr(SPMD, "checks", True)
    with ranks.Traffic() as traffic:
        integration.summed_cross_entropy(logits, labels)
    assert not traffic.seen, "torchtitan's own loss has its type checks"


def test_without_torchtitan(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportError, match=r"torchtitan 0\.3 or later"):
        importlib.import_module(NAME)
