"""`fuse` on Llama 4's layer, whose experts each compute every token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import (
    Llama4ForCausalLM,
    Llama4Router,
    Llama4TextExperts,
    Llama4TextMoe,
)

from called_ops import called
from graphs import Recorder, liger_ops_of
from liger_ops import fuse, unfuse
from rewriting import assert_same, each_dtype, values

D, E = 8, 4
SIZES = {"hidden_size": D, "intermediate_size": 16, "num_local_experts": E}
USED = {"moe_experts_forward": 1, "swiglu": 1}


def layer(top_k: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    module = Llama4TextMoe(Llama4TextConfig(**SIZES, num_experts_per_tok=top_k))
    for i, parameter in enumerate(module.parameters()):
        parameter.data = values(*parameter.shape, seed=i).data / 3
    return module.to(dtype)


def fused(module: nn.Module) -> Any:
    made = copy.deepcopy(module)
    report = fuse(made)
    assert report.counts() == {"moe_experts": 1, "swiglu": 1} and not report.left
    assert (report.fused[1].where, report.fused[1].options) == ("experts", {"activation": "silu"})
    return made


@each_dtype
@pytest.mark.parametrize("top_k", [1, 3])
def test_computes(top_k: int, dtype: torch.dtype) -> None:
    """Values, the router's logits and all gradients."""
    module = layer(top_k, dtype)
    made, x = fused(module), values(2, 5, D, dtype=dtype)
    assert called(made, x)[1] == USED
    with nn.utils.stateless._reparametrize_module(made, dict(module.named_parameters())):
        assert_same(made, module, (x,))
    assert not fuse(made).findings
    assert unfuse(made) == 2 and called(made, x)[1] == {}


def test_autocast_and_float64() -> None:
    module = layer()
    made, x = fused(module), values(2, 5, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert called(made, x)[1] == USED
        torch.testing.assert_close(made(x), module(x), rtol=0.05, atol=0.05)
    for one in (made, module):
        one.double()
    torch.testing.assert_close(made(x.double()), module(x.double()))


def test_changing_numbers_of_tokens_are_one_graph() -> None:
    recorder, made = Recorder(), fused(layer())
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=recorder.backend())
    for count in (4, 7, 9):
        x = values(2, count, D)
        torch.testing.assert_close(compiled(x), made(x))
    assert liger_ops_of(recorder.forwards)["moe_experts_forward"] == 1


def test_the_routers_logits_are_recorded() -> None:
    """By transformers' hooks of the router, with which the layer is still fused."""
    config = Llama4TextConfig(
        **SIZES, num_hidden_layers=2, vocab_size=32, intermediate_size_mlp=16, pad_token_id=0,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    model, x = Llama4ForCausalLM(config), torch.randint(1, 32, (1, 5))
    expected = model(x, output_router_logits=True).router_logits
    fuse(model, attention=False)
    for _ in range(2):
        torch.testing.assert_close(model(x, output_router_logits=True).router_logits, expected)
    assert called(model, x)[1]["moe_experts_forward"] == 2


def other_scores(_: Any, args: Any, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return result[1].sigmoid(), result[1]


def more_experts(module: Any) -> None:
    module.router.top_k = 3


def another_expert(module: Any) -> None:
    module.experts = type("Other", (Llama4TextExperts,), {})(Llama4TextConfig(**SIZES))
    for parameter in module.experts.parameters():
        parameter.data = values(*parameter.shape, seed=1).data


# What changes a layer, and what is said of it.
CHANGES = {
    "top-k": (more_experts, "router.top_k was changed"),
    "router-hook": (
        lambda module: module.router.register_forward_hook(other_scores),
        "router has hooks that may change its results",
    ),
    "expert-hook": (
        lambda module: module.experts.register_forward_hook(lambda *_: None),
        "experts, which would not be called, has hooks",
    ),
    "experts": (another_expert, "experts is another module"),
    "activation": (
        lambda module: setattr(module.experts, "act_fn", nn.GELU()),
        "experts.act_fn is another module",
    ),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_later_changes_are_noticed(change: Any, reason: str) -> None:
    module = layer()
    made, x = fused(module), values(2, 5, D)
    for one in (module, made):
        change(one)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(made(x)[0], module(x)[0])


def quantised(module: Any) -> None:
    module.experts.down_proj = type("Quantised", (nn.Parameter,), {})(module.experts.down_proj.data)


class EveryScore(Llama4Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.Linear.forward(self, x)
        return logits.sigmoid(), logits


def every_score(module: Any) -> None:
    module.router.__class__ = EveryScore


LEFT = {
    "hook": (CHANGES["router-hook"][0], "router has hooks"),
    "quantised": (quantised, "experts.down_proj is a Quantised"),
    "every-score": (every_score, "its scores are not sigmoids of a few values among -inf"),
}


@pytest.mark.parametrize(("change", "reason"), LEFT.values(), ids=LEFT)
def test_layers_that_are_left(change: Any, reason: str) -> None:
    module = layer()
    change(module)
    (left,) = fuse(module).left
    assert left.where == "experts" and "has no _apply_gate" in left.reason
    assert reason in left.reason
