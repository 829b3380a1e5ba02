"""Attention that is written out but stays, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rewriting import Rewriter, refused, values
from unfused_attentions import LENGTH, causal, causal_float


def qkv() -> list[Tensor]:
    return [values(2, 4, LENGTH, 8, seed=seed) for seed in range(3)]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(2, 3)) * 0.3


def returned(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = scores(q, k).softmax(-1)
    return weights @ v, weights


def used(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.sum()


def scores_used(q: Tensor, k: Tensor, v: Tensor) -> Any:
    raw = scores(q, k)
    return raw.softmax(-1) @ v + raw.square().mean()


def head_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * torch.tensor([1.0, 0.0, 1.0, 1.0]).view(4, 1, 1)) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(scores(q, k) / 2.0) * 2.0 + causal_float(q, k)).softmax(-1) @ v


def rows_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The code gives the mean of the values in the first row."""
    return scores(q, k).masked_fill(~causal(q, k).tril(-1), -1e30).softmax(-1) @ v


def low_rows_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(causal(q, k).tril(-1), 0.0, torch.finfo(torch.float32).min)
    return (scores(q, k) + mask).softmax(-1) @ v


def row_of_integers_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(causal(q, k).tril(-1), 0, -(10**9))
    return (scores(q, k) + mask.to(q.dtype)).softmax(-1) @ v


def row_of_bytes_without_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bytes of the lowest float32."""
    mask = torch.where(causal(q, k).tril(-1), 0, -8388609).to(torch.int32)
    return (scores(q, k) + mask.view(torch.float32)).softmax(-1) @ v


def fill_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    fill = torch.tensor(-1e9)
    fill.zero_()
    return scores(q, k).masked_fill(~causal(q, k), fill).softmax(-1) @ v


def query_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0
    raw = scores(q, k)
    q.zero_()
    return raw.softmax(-1) @ v + q


def mask_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask.masked_fill_(~causal(q, k), -torch.inf)
    return (scores(q, k) + mask).softmax(-1) @ v


def two_modes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        raw = scores(q, k)
    return raw.softmax(-1) @ v


def scores_in_place_and_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raw = q @ k.mT
    before = raw[0, 0, 0]
    raw *= 0.3
    return raw.softmax(-1) @ v + before.sum()


NEAR_MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "weights-returned": (returned, "weights or scores are returned"),
    "weights-used": (used, "is used elsewhere, by"),
    "scores-used": (scores_used, "is used elsewhere, by"),
    "over-queries": (lambda q, k, v: scores(q, k).softmax(-2) @ v, "softmax is not over the keys"),
    "head-mask": (head_mask, "changed after the softmax"),
    "mask-after-softmax": (
        lambda q, k, v: scores(q, k).softmax(-1).masked_fill(~causal(q, k), 0.0) @ v,
        "changed after the softmax",
    ),
    "scale-of-heads": (
        lambda q, k, v: (q @ k.mT * torch.arange(1.0, 5.0).view(4, 1, 1)).softmax(-1) @ v,
        "multiplied by a tensor",
    ),
    "scaled-after-mask": (
        lambda q, k, v: ((q @ k.mT + causal_float(q, k)) / 3.0).softmax(-1) @ v,
        "scaled after a mask is added",
    ),
    "negative-scale": (lambda q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v, "multiplied by -0.3"),
    "capped": (capped, "scores are capped, which scaled_dot_product_attention cannot do"),
    "low-fill": (
        lambda q, k, v: scores(q, k).masked_fill(~causal(q, k), -4.0).softmax(-1) @ v,
        "fills hidden scores with -4.0",
    ),
    "filled-row": (rows_without_a_key, "may hide every key of a row"),
    "added-row": (low_rows_without_a_key, "may hide every key of a row"),
    "integers-row": (row_of_integers_without_a_key, "may hide every key of a row"),
    "bytes-row": (row_of_bytes_without_a_key, "may hide every key of a row"),
    "nan-fill": (
        lambda q, k, v: scores(q, k).masked_fill(~causal(q, k), float("nan")).softmax(-1) @ v,
        "fills hidden scores with nan",
    ),
    "fill-written": (fill_written, "is written in place"),
    "mask-written": (mask_written, "may hide every key of a row"),
    "two-modes": (two_modes, "different gradient or autocast modes"),
    "in-place-and-before": (scores_in_place_and_before, "is used elsewhere, by"),
    "no-softmax": (lambda q, k, v: torch.sigmoid(scores(q, k)) @ v, ""),
    "no-product": (lambda q, k, v: (q @ v.mT + k.sum()).relu().softmax(-1) @ v, ""),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function: Callable[..., Any], reason: str) -> None:
    refused(function, *qkv(), op="attention", reason=reason)


def test_a_write_between_the_products() -> None:
    inputs = [x.detach() for x in qkv()]
    refused(query_written, *inputs, op="attention", reason="written in place")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_are_data(dtype: torch.dtype) -> None:
    """A mask that is passed to the graph may hide every key of a row."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        raw = scores(q, k)
        raw = raw + mask if mask.is_floating_point() else raw.masked_fill(mask, -torch.inf)
        return raw.softmax(-1) @ v

    mask = torch.zeros(2, 1, 1, LENGTH, dtype=dtype)
    refused(attention, *qkv(), mask, op="attention", reason="may hide every key of a row")


@pytest.mark.parametrize(("kept", "reason"), [(slice(-1), "it has sinks"), (slice(1, None), "")])
def test_sinks(kept: slice, reason: str) -> None:
    """As GPT-OSS writes them; and with the weights of another column dropped."""

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        raw = torch.cat([scores(q, k) + causal_float(q, k), column], dim=-1)
        raw = raw - raw.max(dim=-1, keepdim=True).values
        weights = F.softmax(raw, dim=-1, dtype=raw.dtype)[..., kept]
        return torch.matmul(F.dropout(weights, p=0.0, training=True), v)

    refused(attention, *qkv(), values(4), op="attention", reason=reason)


@pytest.mark.parametrize("function", [F.dropout, torch.dropout])
def test_dropout(function: Callable[..., Tensor]) -> None:
    found = Rewriter()
    torch._dynamo.reset()
    attention = lambda q, k, v: function(scores(q, k).softmax(-1), 0.5, True) @ v
    torch.compile(attention, backend=found, fullgraph=True)(*qkv())
    assert found.reasons("attention") == [
        "it has dropout, and another kernel would drop other weights"
    ]


def test_values_of_another_dtype() -> None:
    """Queries in float32 that are no casts cannot be narrowed."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).to(v.dtype) @ v

    q, k, v = qkv()
    v = v.detach().bfloat16().requires_grad_()
    refused(attention, q, k, v, op="attention", reason="have the dtypes")


def test_a_bias_of_a_wider_dtype() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (scores(q, k) + bias).softmax(-1).to(v.dtype) @ v

    narrow = [x.detach().bfloat16().requires_grad_() for x in qkv()]
    reason = "its bias is torch.float32, and would be rounded"
    refused(attention, *narrow, values(LENGTH, LENGTH), op="attention", reason=reason)


def test_inside_of_vmap() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.vmap(lambda q, k, v: scores(q, k).softmax(-1) @ v)(q, k, v)

    inputs = [values(3, 2, 4, LENGTH, 8, seed=seed) for seed in range(3)]
    refused(attention, *inputs, op="attention", reason="not a plain dense tensor")
