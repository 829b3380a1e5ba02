"""torchtitan's overrides, in a stand-in of torchtitan's modules."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
            spmd=SimpleNamespace(is_type_checking=lambda: False),
            spmd_mesh_size=lambda axis: 1,
        )
    },
    "torchtitan.config": {"override": override, "derive": derive},
    "torchtitan.distributed": {},
    "torchtitan.distributed.utils": {"get_spmd_backend": lambda: "spmd_types"},
    "torchtitan.models": {},
    "torchtitan.models.common": {"RMSNorm": RMSNorm},
    "torchtitan.models.common.feed_forward": {"FeedForward": FeedForward},
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


def seeded(owner: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return owner(config)


def results(function: Any, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *parameters])]


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
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5, 37, generator=generator)
    labels = torch.randint(37, (2, 5), generator=generator)
    labels[0, :3] = IGNORED
    tokens = torch.tensor(7.0)
    pairs = [
        results(lambda x, loss=loss: loss(x, labels, tokens)[0], logits, [])
        for loss in (ours, CrossEntropyLoss(config))
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_subclasses_are_left(integration):
    """Their forwards are their own."""
    registered = dict(REGISTERED)
    assert registered == {
        "rms_norm": (RMSNorm.Config, True),
        "swiglu": (FeedForward.Config, True),
        "cross_entropy": (CrossEntropyLoss.Config, True),
    }


def test_without_torchtitan(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportError, match=r"torchtitan 0\.3 or later"):
        importlib.import_module(NAME)
