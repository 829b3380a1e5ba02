"""Hyper-connections in the models that have them, and modules that are nearly that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

import liger_ops
from called_ops import called
from hyper_connections import (
    CONFIG,
    HC,
    HIDDEN,
    MODULES,
    NEAR_MISSES,
    OPTIONS,
    Connection,
    Rounded,
    layer,
)  # fmt: skip
from liger_ops import fuse, unfuse
from rewriting import NARROW, Rewriter, assert_same, each_dtype, values
from trained_models import MODELS, whole_sequences

ONLY = {
    "norms": False, "activations": False, "rope": False, "attention": False, "loss": False,
}  # fmt: skip


USED = {"mhc_coeffs_forward": 1, "mhc_pre": 1}


def streams(*rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(*rows, HC, HIDDEN, dtype=dtype)


@each_dtype
@pytest.mark.parametrize("make", [*MODULES.values(), Connection], ids=[*MODULES, "written"])
def test_computes(make, dtype):
    """Values and gradients, and what `unfuse` restores."""
    made = layer(make(), dtype)
    fused = copy.deepcopy(made)
    (found,) = fuse(fused, **ONLY).fused
    assert (found.op, found.options, found.where) == ("mhc_coeffs", OPTIONS, "hc")
    assert called(fused, streams(2, 3, dtype=dtype))[1] == USED
    assert fused.state_dict().keys() == made.state_dict().keys()
    if dtype in NARROW or make is Connection:
        assert_same_as(fused, made, streams(2, 3, dtype=dtype))
    assert not fuse(fused, **ONLY).fused
    assert unfuse(fused) == 1 and type(fused.hc) is type(made.hc)
    assert called(fused, streams(2, 3, dtype=dtype))[1] == {}


def assert_same_as(fused: nn.Module, made: nn.Module, x: Tensor) -> None:
    """`assert_same` with the gradients of the parameters of one module."""
    for one, other in zip(fused.parameters(), made.parameters(), strict=True):
        one.data = other.data
    with torch.nn.utils.stateless._reparametrize_module(fused, dict(made.named_parameters())):
        assert_same(fused, made, (x,))


def test_other_inputs_reach_the_code():
    """Inputs reach the code for which it returns other dtypes than the op, or fails."""
    fused = layer(Connection())
    plain = copy.deepcopy(fused)
    fuse(fused, **ONLY)
    wide, x = streams(2, 3).double(), streams(2, 3)
    assert called(fused.hc, wide)[1] == {}
    with pytest.raises(RuntimeError):
        fused.hc(streams(2, 3).squeeze(0)[..., :3])
    with torch.autocast("cpu", torch.bfloat16):
        assert called(fused.hc, x)[1] == USED
        for one, other in zip(fused.hc(x), plain.hc(x), strict=True):
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
        for module in (fused, plain):
            module.bfloat16()
        assert called(fused.hc, x.bfloat16())[1] == {}


def test_the_layer_is_compiled():
    fused = layer(Connection())
    fuse(fused, **ONLY)
    torch._dynamo.reset()
    rewriter = Rewriter()
    x = streams(2, 3)
    compiled = torch.compile(fused, backend=rewriter, fullgraph=True)
    torch.testing.assert_close(compiled(x), fused(x))
    # What the layer's own forward computes.
    assert [(one.op, one.reason) for one in rewriter.findings] == [("mhc_post_res", None)]


class Hooked(Connection):
    """A child would not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.norm.register_forward_hook(lambda *_: None)

    def projection(self, x: Tensor) -> Tensor:
        return self.norm(super().projection(x))


class OtherInTraining(Connection):
    def post(self, logits: Tensor) -> Tensor:
        return (2 if self.training else 3) * torch.sigmoid(logits)


class Counting(Connection):
    calls = 0

    def post(self, logits: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().post(logits)


class More(Connection):
    def forward(self, hidden_streams: Tensor) -> Any:
        post, comb, collapsed = super().forward(hidden_streams)
        return post, comb, collapsed * 2


class ShapedOtherwise(Connection):
    def forward(self, hidden_streams: Tensor) -> Any:
        return list(super().forward(hidden_streams))


LEFT: dict[str, tuple[Any, str]] = {
    **NEAR_MISSES,
    "rounded": (Rounded, "casts or sizes"),
    "hooked": (Hooked, "norm, which would not be called, has hooks"),
    "training": (
        OtherInTraining,
        "post_mult=3.0) and mhc_pre in another case (bfloat16, parameters float32",
    ),
    "counting": (Counting, "changes its attributes"),
    "more": (More, "it computes mul beside mhc_coeffs and mhc_pre"),
    "a-list": (ShapedOtherwise, "it returns list, not a tuple of tensors"),
    "head": (lambda: DeepseekV4HyperHead(CONFIG), "its parameters are hc_fn"),
    "hy_v4": (lambda: named(HYV4HyperConnection), "its parameters are fn"),
}


def named(cls: Any) -> nn.Module:
    config = copy.copy(CONFIG)
    config.hc_magnitude = 2.0
    module: nn.Module = cls(config)
    return module


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_near_misses(make, reason):
    """They are left, and the report says why: their classes are named like hyper-connections."""
    module = make()
    if isinstance(module, Connection):
        module.__class__ = type("HyperConnection", (type(module),), {})
    model = nn.ModuleDict({"hc": module})
    report = fuse(model, **ONLY)
    assert not report.fused and [entry.where for entry in report.left] == ["hc"]
    assert reason in report.left[0].reason, report.left[0].reason


def test_the_switch():
    model = nn.ModuleDict({"hc": Connection()})
    assert not fuse(model, hyper_connections=False).findings
    with pytest.raises(TypeError, match="fuse: hyper_connections must be True or False, got 1"):
        fuse(model, hyper_connections=1)


@pytest.mark.skipif("DeepseekV4ForCausalLM" not in MODELS, reason="transformers has no such model")
def test_a_model_trains_and_generates():
    """DeepSeek-V4 with all that `fuse` finds, with checkpointing, as it does without."""
    model = MODELS["DeepseekV4ForCausalLM"].build()
    fused = copy.deepcopy(model)
    counts = liger_ops.fuse(fused).counts()
    assert counts["mhc_coeffs"] == 2 * len(model.model.layers)
    batch = whole_sequences()
    tokens = [one.eval().generate(batch["input_ids"][:1, :5], max_new_tokens=3, do_sample=False)
              for one in (model, fused)]  # fmt: skip
    assert torch.equal(*tokens)
    for one in (model, fused):
        one.train().gradient_checkpointing_enable({"use_reentrant": False})
        one(**batch).loss.backward()
    for (name, own), other in zip(model.named_parameters(), fused.parameters(), strict=True):
        if own.grad is None:
            assert other.grad is None, name
            continue
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-3, atol=1e-5, msg=name)
