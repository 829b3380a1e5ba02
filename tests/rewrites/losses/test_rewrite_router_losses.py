"""router_losses, found in the load-balancing loss of transformers' mixture models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.doge import modeling_doge
from transformers.models.mixtral import modeling_mixtral
from transformers.models.nllb_moe import modeling_nllb_moe

from rewriting import Rewriter, check, each_dtype, refused, values

FOUND = {"router_losses": 1}
OP = "router_losses"
E, TOP_K, LAYERS = 6, 2, 2
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def layers(tokens: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(tokens, E, dtype=dtype, seed=i) for i in range(LAYERS)]


def counts_of(ids: Tensor, weight: Tensor | None, top_k: int = TOP_K) -> Tensor:
    if weight is None:
        return torch.histc(ids.reshape(-1).float(), bins=E, min=0, max=E)
    return torch.zeros(E).scatter_add_(0, ids.reshape(-1), weight.repeat_interleave(top_k))


def largest(p: Tensor, x: Tensor) -> Tensor:
    return torch.topk(p, TOP_K, dim=-1)[1]


def mean(p: Tensor, weight: Tensor | None) -> Tensor:
    return (p.float() if weight is None else p.float() * weight.unsqueeze(-1)).sum(0)


def total_of(p: Tensor, weight: Tensor | None) -> Any:
    return p.shape[0] if weight is None else weight.sum()


def balanced(
    *gate_logits: Tensor, mask: Tensor | None = None, number: float = E,
    counts: Callable[..., Tensor] = counts_of, choose: Callable[..., Tensor] = largest,
    sums: Callable[..., Tensor] = mean, total: Callable[..., Any] = total_of,
    reduce: Callable[[Tensor], Tensor] = torch.sum,
) -> Tensor:  # fmt: skip
    """Compute the loss as transformers does from 5.24 on; before, counts without a mask are those
    of bincount, which no graph of Dynamo has."""
    tokens, probabilities, rows = torch.zeros(E), torch.zeros(E), 0.0
    weight = None if mask is None else mask.reshape(-1).float()
    for x in gate_logits:
        p = x.softmax(-1)
        tokens = tokens + counts(choose(p, x), weight)
        probabilities = probabilities + sums(p, weight)
        rows = rows + total(p, weight)
    return reduce(tokens / rows * (probabilities / rows).unsqueeze(0)) * number


@pytest.mark.quick(rewrites=("router_losses",))
@each_dtype
def test_the_loss(dtype):
    """Also in changing numbers of tokens."""
    found = check(
        balanced, *layers(dtype=dtype), then=layers(5, dtype), names=(OP,), counts=FOUND,
        dynamic=True,
    )  # fmt: skip
    (call,) = found.calls(OP)
    assert (len(call["gate_logits"]), call["top_k"], call["token_weight"]) == (2, 2, None)
    assert "histc" not in found.graphs[0].code


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK / 4], ids=["int", "bool", "float"])
def test_transformers_with_a_mask(mask):
    def loss(mask: Tensor, *gate_logits: Tensor) -> Tensor:
        return modeling_mixtral.load_balancing_loss_func(gate_logits, E, TOP_K, mask)

    longer = mask.repeat(1, 2), *layers(16)
    found = check(loss, mask, *layers(), then=longer, names=(OP,), counts=FOUND, dynamic=True)
    assert found.calls(OP)[0]["token_weight"] is not None
    assert "scatter" not in found.graphs[0].code


def test_other_ways_to_write_it():
    """Counts without a write, a choice by logits, float64, and bins from 0 to E - 1."""

    def counts(ids: Tensor, weight: Tensor | None) -> Tensor:
        repeated = weight.repeat_interleave(TOP_K)  # type: ignore[union-attr]
        return torch.scatter_add(torch.zeros(E), 0, ids.flatten(), repeated)

    choose = lambda p, x: x.topk(TOP_K).indices
    check(functools.partial(balanced, mask=MASK, counts=counts), *layers(), counts=FOUND)
    check(functools.partial(balanced, choose=choose), *layers(), counts=FOUND)
    check(balanced, *layers(dtype=torch.float64), counts=FOUND)
    upto = lambda ids, weight: torch.histc(ids.flatten().int().float(), E, 0, E - 1)
    check(functools.partial(balanced, counts=upto), *layers(), counts=FOUND)


def test_more_layers_than_the_op_takes_at_once():
    many = [values(4, E, seed=i) for i in range(9)]
    assert len(check(balanced, *many, counts=FOUND).calls(OP)[0]["gate_logits"]) == 9


def test_autocast():
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return balanced(x @ weight, (x * 2) @ weight, mask=MASK)

    torch._dynamo.reset()
    given = values(8, E), values(E, E)
    compiled = torch.compile(loss, backend=(rewriter := Rewriter()), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, own = compiled(*given), loss(*given)
    assert rewriter.counts() == FOUND and found.dtype is own.dtype is torch.float32
    torch.testing.assert_close(found, own, rtol=0.02, atol=0.02)
    gradients = (torch.autograd.grad(one, given) for one in (found, own))
    for after, before in zip(*gradients, strict=True):
        torch.testing.assert_close(after, before, rtol=0.02, atol=0.02 * before.abs().max().item())


def test_a_checkpointed_block():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return balanced(x, x @ weight)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(block, x * 2, weight, use_reentrant=False)

    found = check(loss, values(8, E), values(E, E), counts=FOUND)
    assert any("checkpoint" in str(node.target) for node in found.nodes())


def shifted(p: Tensor, weight: Tensor | None) -> int:
    return p.shape[0] - 1


def written(x: Tensor, *others: Tensor) -> Tensor:
    x = x * 1.0
    p = x.softmax(-1)
    x.mul_(2)
    tokens, probabilities = counts_of(largest(p, x), None), mean(p, None)
    return torch.sum(tokens / 8 * (probabilities / 8)) * E


def used(x: Tensor, *others: Tensor) -> Any:
    p = x.softmax(-1)
    tokens, probabilities = counts_of(largest(p, x), None) / 8, mean(p, None) / 8
    return torch.sum(tokens * probabilities) * E, tokens


def outer(x: Tensor, *others: Tensor) -> Tensor:
    p = x.softmax(-1)
    tokens, probabilities = counts_of(largest(p, x), None) / 8, mean(p, None) / 8
    return torch.sum(tokens.unsqueeze(-1) * probabilities) * E


def written_counts(ids: Tensor, weight: Tensor | None) -> Tensor:
    return counts_of(ids, weight).mul_(2)


def some(ids: Tensor, weight: Tensor | None) -> Tensor:
    return torch.histc(ids.reshape(-1).float(), bins=E, min=0, max=E + 1)


def narrow(ids: Tensor, weight: Tensor | None) -> Tensor:
    return torch.histc(ids.reshape(-1).bfloat16(), bins=E, min=0, max=E).float()


partial = functools.partial
NEAR_MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "number": (partial(balanced, number=E + 1), "it is multiplied by 7"),
    "mean": (partial(balanced, reduce=torch.mean), "is not the sum"),
    "total": (partial(balanced, total=shifted), "it does not divide by the number of its tokens"),
    "tokens": (
        partial(balanced, mask=MASK, total=lambda p, weight: p.shape[0]),
        "it does not divide by the number of its tokens",
    ),
    "unweighted": (
        partial(balanced, mask=MASK, sums=lambda p, weight: p.float().sum(0)), "different weights"
    ),
    "half": (
        partial(balanced, mask=MASK, counts=partial(counts_of, top_k=3)), "not repeated for each"
    ),
    "smallest": (
        partial(balanced, choose=lambda p, x: p.topk(TOP_K, largest=False)[1]), "the largest"
    ),
    "other": (
        partial(balanced, choose=lambda p, x: (-x).softmax(-1).topk(TOP_K)[1]),
        "its counts are not of the logits whose probabilities it sums",
    ),
    "choice": (partial(balanced, choose=lambda p, x: (p * x).topk(TOP_K)[1]), "its counts are not"),
    "bins": (partial(balanced, counts=some), "its bins are not one for each expert"),
    "rounded": (partial(balanced, counts=narrow), "is not the scatter_add"),
    "squares": (partial(balanced, sums=lambda p, _: p.square().sum(0)), "is not the softmax"),
    "written": (written, "written in place"),
    "counts": (partial(balanced, counts=written_counts), "is not the scatter_add"),
    "used": (used, "is used elsewhere"),
    "outer": (outer, "it multiplies the share of each choice"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function, reason):
    refused(function, *layers(), op=OP, reason=reason)


def test_sums_in_a_narrow_dtype():
    def sums(p: Tensor, _: Any) -> Tensor:
        return p.sum(0)

    given = layers(dtype=torch.bfloat16)
    refused(partial(balanced, sums=sums), *given, op=OP, reason="summed in torch.bfloat16")


@pytest.mark.parametrize("mask", [None, MASK])
def test_losses_of_other_models(mask):
    def of_nllb(*gate_logits: Tensor) -> Tensor:
        return modeling_nllb_moe.load_balancing_loss_func(gate_logits, E, TOP_K, mask)

    def of_doge(*gate_logits: Tensor) -> Tensor:
        return modeling_doge.load_balancing_loss_func(gate_logits, 9, 3, TOP_K, None)

    refused(of_nllb, *layers(), op=OP, reason="it multiplies the share of each choice")
    pairs = [values(2, 8, 3, seed=i) for i in range(LAYERS)]
    refused(of_doge, *pairs, op=OP, reason=" is not the ")


def test_a_mask_with_a_gradient():
    def loss(mask: Tensor, *gate_logits: Tensor) -> Tensor:
        return balanced(*gate_logits, mask=mask)

    refused(loss, values(2, 4), *layers(), op=OP, reason="have a gradient")


def test_explain_says_why():
    compiled = torch.compile(partial(balanced, number=E + 1), backend=(found := Rewriter()))
    compiled(*layers())
    (finding,) = found.findings
    assert finding.op == OP and "test_rewrite_router_losses.py" in finding.where
