"""moe_experts, found where every expert computes every token, as in Llama 4."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from rewriting import Rewriter, check, each_dtype, refused, values

FOUND = {"moe_experts": 1}
T, E, D = 5, 4, 6


@pytest.mark.quick(rewrites=("moe_experts",))
@each_dtype
@pytest.mark.parametrize("top_k", [1, 3])
def test_llama4(top_k, dtype):
    """Also in changing numbers, and of a token whose scores are all 0."""
    module = Llama4TextMoe(
        Llama4TextConfig(
            hidden_size=D, intermediate_size=8, num_local_experts=E, num_experts_per_tok=top_k
        )
    ).to(dtype)
    for i, parameter in enumerate(module.parameters()):
        parameter.data = values(*parameter.shape, dtype=dtype, seed=i).data / 2
    x, then = (values(2, n, D, dtype=dtype) for n in (3, 5))
    with torch.no_grad():
        weight = module.router.weight
        x[0, 0] = -2000 * weight.sum(0) / weight.sum(0).square().sum()
    found = check(module, x, then=(then,), names=("moe_experts",), counts=FOUND, dynamic=True)
    assert found.calls("moe_experts")[0]["activation"] == "silu"


def scores_of(logits: Tensor, fill: float = -math.inf) -> Tensor:
    best = logits.topk(2, 1)
    return torch.full_like(logits, fill).scatter(1, best.indices, best.values).sigmoid()


def moe(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor,
    scores: Callable[[Tensor], Tensor] = scores_of, act: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:  # fmt: skip
    scaled = x.repeat((E, 1)) * scores(logits).transpose(0, 1).reshape(-1, 1)
    gate, up = scaled.view(E, -1, D).bmm(gate_up).chunk(2, dim=-1)
    return torch.bmm(act(gate) * up, down).view(-1, D).reshape(E, -1, D).sum(0)


def given(logits: tuple[int, int] = (T, E)) -> tuple[Tensor, ...]:
    return values(T, D), values(*logits), values(E, D, 16), values(E, 8, D)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    act = functools.partial(F.gelu, approximate=approximate)
    found = check(functools.partial(moe, act=act), *given(), counts=FOUND)
    assert found.calls("moe_experts")[0]["activation"].startswith("gelu")


def test_autocast():
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend=(rewriter := Rewriter(("moe_experts",))))
    with torch.autocast("cpu", torch.bfloat16):
        found, own = (one(*given()) for one in (compiled, moe))
    assert rewriter.counts() == FOUND
    torch.testing.assert_close(found, own, rtol=0.02, atol=0.02 * own.abs().max().item())


def written_after(logits: Tensor) -> Tensor:
    best = logits.topk(2, 1)
    among = torch.full_like(logits, -math.inf).scatter_(1, best.indices, best.values)
    among.clamp_(min=-9.0)
    return among.sigmoid()


def written_before(logits: Tensor) -> Tensor:
    best, among = logits.topk(2, 1), torch.full_like(logits, -math.inf)
    among.clamp_(min=-9.0)
    return among.scatter_(1, best.indices, best.values).sigmoid()


def used_elsewhere(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    kept = []
    y = moe(x, logits, gate_up, down, act=lambda gate: kept.append(F.silu(gate)) or kept[0])
    return y, kept


NO_SIGMOIDS = "its scores are not sigmoids of a few values among -inf"
NEAR_MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    **{
        name: (functools.partial(moe, scores=scores), reason)
        for name, scores, reason in (
            ("every-score", torch.sigmoid, NO_SIGMOIDS),
            ("softmax", lambda logits: logits.softmax(1), NO_SIGMOIDS),
            ("among-zeros", functools.partial(scores_of, fill=0.0), NO_SIGMOIDS),
            ("more", lambda logits: scores_of(logits) + 0.5, NO_SIGMOIDS),
            ("written-after", written_after, "its scores are written in place"),
            ("written-before", written_before, "its scores are written in place"),
            ("other-scores", lambda logits: scores_of(logits.T.reshape(E, T)), "have the shape"),
        )
    },
    "used": (used_elsewhere, "a value on the way, is used elsewhere"),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function, reason):
    own = {} if function is used_elsewhere else {"swiglu": 1}
    refused(function, *given(), op="moe_experts", reason=reason, counts=own)
