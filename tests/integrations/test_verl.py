"""The op behind verl's FusedLinearForPPO, in a stand-in of verl's modules."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import Recorder, liger_ops_of
from liger_ops.integrations import verl as integration

TOKENS, D, V = 12, 8, 37
PARENTS = ("verl", "verl.utils", "verl.utils.experimental")


class VerlsOwn(torch.nn.Module):
    """A module with the signature of verl's, of the formula."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        log_p = ((hidden_states @ vocab_weights.t()) / temperature).log_softmax(-1)
        picked = log_p.gather(-1, input_ids.long().unsqueeze(-1)).squeeze(-1)
        return picked, -(log_p.exp() * log_p).sum(-1)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the class, as verl lays it out."""
    for name in (*PARENTS, integration.MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__path__ = []
    module = sys.modules[integration.MODULE]
    module.FusedLinearForPPO = VerlsOwn  # type: ignore[attr-defined]
    yield module
    integration.uninstall()


def forward(hidden: Tensor, weight: Tensor, input_ids: Tensor, temperature: float) -> Any:
    """As the forwards of verl's models call it."""
    module = importlib.import_module(integration.MODULE)
    return module.FusedLinearForPPO(impl_backend="liger").forward(
        hidden_states=hidden, vocab_weights=weight, input_ids=input_ids, temperature=temperature
    )


def results(function: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Both results, and the gradients of a function of both."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    hidden, weight = draw(*shape, D), draw(V, D)
    input_ids = torch.randint(V, shape, generator=generator, dtype=torch.int32)
    values = function(hidden, weight, input_ids, 0.7)
    loss = (values[0].exp() + values[1]).square().sum()
    return [*values, *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize("shape", ((TOKENS,), (3, 4)))
def test_same_as_verl(shape: tuple[int, ...], verl: ModuleType) -> None:
    expected = results(forward, shape, torch.float64)
    integration.install()
    for one, other in zip(results(forward, shape, torch.float64), expected, strict=True):
        torch.testing.assert_close(one, other)
    found = results(forward, shape, torch.bfloat16)
    assert [x.dtype for x in found] == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_one_operator_compiled(verl: ModuleType) -> None:
    integration.install()
    recorder = Recorder()
    ours = verl.FusedLinearForPPO()
    compiled = torch.compile(ours, backend=recorder.backend(), fullgraph=True, dynamic=True)
    for shape in ((TOKENS,), (17,)):
        values = (results(function, shape, torch.float32) for function in (compiled, ours))
        for one, other in zip(*values, strict=True):
            torch.testing.assert_close(one, other)
    assert liger_ops_of(recorder.forwards) == {"linear_log_prob_forward": 1}


def test_installed_once_and_undone(verl: ModuleType) -> None:
    integration.uninstall()
    integration.install()
    integration.install()
    assert verl.FusedLinearForPPO is integration.FusedLinearForPPO
    of = [inspect.signature(c.forward) for c in (VerlsOwn, verl.FusedLinearForPPO)]
    assert of[0] == of[1] and verl.FusedLinearForPPO(chunk_size=64).chunk_size == 64
    of = [inspect.signature(c) for c in (VerlsOwn, verl.FusedLinearForPPO)]
    assert of[0] == of[1]
    with pytest.raises(ValueError, match="impl_backend must be 'torch' or 'liger', got 'triton'"):
        verl.FusedLinearForPPO(impl_backend="triton")
    integration.uninstall()
    assert verl.FusedLinearForPPO is VerlsOwn


def test_another_version_is_left(verl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(verl, "FusedLinearForPPO")
    with pytest.raises(RuntimeError, match="must have FusedLinearForPPO; this version"):
        integration.install()
    monkeypatch.delitem(sys.modules, integration.MODULE)
    with pytest.raises(RuntimeError, match="must have FusedLinearForPPO; this version"):
        integration.install()


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match="verl"):
        integration.install()
