"""`fuse(verify=batch)` and `explain(fused, verify=True)` compare with the model before `fuse`."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import liger_ops
from fused_models import LLAMA, QWEN3_MOE
from liger_ops import fuse, unfuse
from liger_ops.fusion import classes
from liger_ops.fusion.layers.norms import Norms

pytestmark = pytest.mark.usefixtures("empty_caches")

# Below the rounding of bfloat16, which is 4e-3.
SLIGHT = 1.0005


def slightly_wrong(y: Tensor, x: Tensor, eps: float) -> Tensor:
    return y * SLIGHT


def wrong_output(y: Tensor, x: Tensor, eps: float) -> Tensor:
    """The output of `side` in a model, which no gradient depends on."""
    return y * (SLIGHT if eps == 1e-5 else 1)


def without_gradient(y: Tensor, x: Tensor, eps: float) -> Tensor:
    """The norm as it is, but its weight gets no gradient."""
    return y.detach() + (x - x.detach())


def set_norms(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    """Let fused norms return what `wrong` makes of their result."""
    caller = Norms.caller

    def patched(facts: Any, op: Any, i: int) -> Callable[..., Any]:
        norm = caller(facts, op, i)
        return lambda x, *rest: wrong(norm(x, *rest), x, op.options()["eps"])

    monkeypatch.setattr(Norms, "caller", staticmethod(patched))
    monkeypatch.setattr(classes, "_subclasses", weakref.WeakValueDictionary())


class Model(nn.Module):
    """It draws random numbers, has buffers that a step changes, and a parameter without use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.side = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-5)
        self.batch_norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.out, self.unused = nn.Linear(16, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        side = self.side(x)
        y = self.out(self.norm(self.dropout(self.batch_norm(x))))
        return {"loss": y.float().square().mean(), "side": side}


def llama(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    tokens = LLAMA.inputs(dtype)
    return LLAMA.model().to(dtype), {"input_ids": tokens, "labels": tokens}


def rows() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_right_is_verified(dtype: torch.dtype) -> None:
    model, batch = llama(dtype)
    report = fuse(model, verify=batch)
    verification = report.verification
    assert verification is not None and verification.agrees and report.counts()["rms_norm"] == 5
    assert verification.truth is verification.wide_dtype is torch.float64
    names = {one.name for one in verification.wide}
    assert names == {"loss", *(name for name, _ in model.named_parameters())}
    # Rounding of float64, magnified a few times.
    assert max(one.difference for one in verification.wide) < 1e-13
    assert "both models in torch.float64: loss equal to" in str(report)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_explain_compares_a_fused_model_with_the_unfused_one() -> None:
    model, x = Model(), rows()
    fuse(model)
    explained = liger_ops.explain(model, x, verify=True)
    verification = explained.verification
    assert verification is not None and verification.agrees
    assert verification.wide_dtype is torch.float64
    names = {name for name, _ in model.named_parameters()} - {"side.weight", "unused"}
    assert {one.name for one in verification.wide} == {"loss", "output side", *names}
    assert "both models in torch.float64: loss equal to" in str(explained)


WRONG = {
    "values": (slightly_wrong, torch.float32, "norm.weight: differs by 1.0e-03"),
    "below the rounding": (slightly_wrong, torch.bfloat16, "norm.weight: differs by 1.0e-03"),
    "no gradient": (
        without_gradient,
        torch.float32,
        "norm.weight: no gradient in the changed model",
    ),
    "output": (wrong_output, torch.float32, "output side: differs by 5.0e-04"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_caught_by_both(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, dtype, said = WRONG[case]
    model, x = Model().to(dtype), rows().to(dtype)
    modules = {name: type(module) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    set_norms(monkeypatch, forward)
    with pytest.raises(ValueError, match="the model is left as it was") as error:
        fuse(model, verify=x)
    assert said in str(error.value) and "DO NOT AGREE" in str(error.value)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    fuse(model)
    verification = liger_ops.explain(model, x, verify=True).verification
    assert verification is not None and not verification.agrees
    assert said in str(verification) and "DO NOT AGREE" in str(verification)
    # The fused model is fused again.
    assert unfuse(model) == 2


def test_a_function_of_a_fused_model_is_compared_with_the_unfused_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_norms(monkeypatch, slightly_wrong)
    model = Model()
    fuse(model)
    explained = liger_ops.explain(lambda x: model(x)["loss"], rows(), verify=True)
    assert explained.verification is not None and not explained.verification.agrees
    assert "explain was given a function" in str(explained)


def test_a_wrong_transformers_model_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(torch.bfloat16)
    modules, implementation = list(map(type, model.modules())), model.config._attn_implementation
    set_norms(monkeypatch, slightly_wrong)
    with pytest.raises(ValueError, match=r"layernorm\.weight: differs by"):
        fuse(model, verify=batch)
    assert list(map(type, model.modules())) == modules
    assert model.config._attn_implementation == implementation
    assert unfuse(model) == 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_verification_changes_no_state(dropout: float) -> None:
    model = Model(dropout)
    buffers = [buffer.clone() for buffer in model.buffers()]
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    verification = fuse(model, verify={"x": rows().requires_grad_()}).verification
    assert verification is not None and verification.agrees
    assert (verification.truth is None) == bool(dropout) == ("random" in str(verification))
    assert verification.wide_dtype is torch.float64
    assert {"output side", "argument x"} <= {one.name for one in verification.wide}
    assert "unused" not in {one.name for one in verification.wide}
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (numpy.random.get_state()[1] == before[2]).all()
    assert all(map(torch.equal, model.buffers(), buffers))


@pytest.mark.parametrize("mode", ["tuples", "evaluation", "checkpointed", "reentrant"])
def test_ways_of_running(mode: str) -> None:
    model, batch = llama(torch.float32)
    arguments: dict[str, Any] = {"return_dict": False} if mode == "tuples" else {}
    model.train(mode != "evaluation")
    if mode in ("checkpointed", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        # With a checkpoint there is no cache, and so a mask of documents: in all runs or in none.
        model.config.use_cache = True
        arguments["position_ids"] = torch.arange(7).remainder(4).expand(2, 7)
    verification = fuse(model, verify={**batch, **arguments}).verification
    assert verification is not None and verification.agrees
    assert max(one.own_error or 0 for one in verification.differences) < 1e-5
    assert ("output logits" in {one.name for one in verification.wide}) == (mode == "evaluation")


def test_operations_without_float64() -> None:
    """PyTorch's grouped_mm takes no float64."""
    model, x = QWEN3_MOE.model().bfloat16(), QWEN3_MOE.inputs(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    verification = fuse(model, verify=(x,)).verification
    assert verification is not None and verification.wide_dtype is torch.float64


UNVERIFIED = {
    "sharded": "lm_head.weight is sharded",
    "meta": "weight is on the meta device",
    "raises": "the changed model raises, and the unchanged one does not: RuntimeError: broken",
    "not finite": "the loss of the unchanged model on this batch is not finite",
}


@pytest.mark.parametrize("case", UNVERIFIED)
def test_what_cannot_be_verified_is_left(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(torch.float32)
    if case == "sharded":
        model.lm_head.weight.ds_shape = model.lm_head.weight.shape
    elif case == "meta":
        model.to("meta")
    elif case == "not finite":
        model.lm_head.weight.data[0, 0] = torch.inf
    else:

        def broken(*call: Any) -> Any:
            raise RuntimeError("broken")

        set_norms(monkeypatch, broken)
    modules = list(map(type, model.modules()))
    with pytest.raises(ValueError, match=f"left as it was, unverified: .*{UNVERIFIED[case]}"):
        fuse(model, verify=batch)
    assert list(map(type, model.modules())) == modules
