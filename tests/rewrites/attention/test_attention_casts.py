"""Attention whose code rounds: to the dtype of its queries, which kernels do less often, or to a
narrower dtype, which no kernel does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_graphs import as_it_is, compiled, heads, results
from causal_masks import causal
from data_masks import on_the_cpu
from liger_ops.rewrites.attention import masked_attention, sdpa

LENGTH = 6
Code = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


def low(q: Tensor) -> Tensor:
    shape = q.shape[-2], q.shape[-2]
    return torch.zeros(shape, dtype=q.dtype).masked_fill(~causal(*shape), -torch.inf)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.5


# What the code casts, and back to the dtype of the queries.
PLACES: dict[str, Code] = {
    "scores": lambda q, k, v, dtype: scores(q, k).to(dtype).to(q.dtype).softmax(-1) @ v,
    "scaled": lambda q, k, v, dtype: ((q @ k.mT).to(dtype).to(q.dtype) * 0.5).softmax(-1) @ v,
    "masked": lambda q, k, v, dtype: (scores(q, k) + low(q)).to(dtype).to(q.dtype).softmax(-1) @ v,
    "weights": lambda q, k, v, dtype: scores(q, k).softmax(-1).to(dtype).to(q.dtype) @ v,
    "softmax": lambda q, k, v, dtype: scores(q, k).softmax(-1, dtype=dtype).to(q.dtype) @ v,
}
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool)
HALVES = (torch.bfloat16, torch.float16)
ROUNDINGS = [
    *((place, torch.float32, dtype) for place in PLACES for dtype in (torch.bfloat16, torch.int8)),
    *(("weights", torch.float32, dtype) for dtype in (*EIGHT_BITS, torch.float16)),
    *(("scores", torch.bfloat16, dtype) for dtype in (torch.float8_e4m3fn, torch.float16)),
    ("softmax", torch.float16, torch.bfloat16),
]
KEPT = [
    *((torch.float32, dtype) for dtype in (torch.float32, torch.float64)),
    *((torch.bfloat16, dtype) for dtype in (torch.bfloat16, torch.float32)),
]


def qkv(dtype: torch.dtype) -> list[Tensor]:
    return [heads(2, 4, LENGTH, 16, seed).to(dtype) for seed in range(3)]


def compare(
    code: Code, own: torch.dtype, dtype: torch.dtype, count: int, rewrite=sdpa.rewrite
) -> list[str | None]:
    """Compare results and gradients in their own dtype; return why attention was left."""
    function = lambda *inputs: code(*inputs, dtype)
    rewritten, report, _ = compiled(function, [rewrite], inner=as_it_is)
    for one, other in zip(results(rewritten, qkv(own)), results(function, qkv(own)), strict=True):
        bound = 8 * torch.finfo(own).eps * float(other.abs().max()) if count else 0.0
        torch.testing.assert_close(one, other, atol=bound, rtol=0.0)
    assert sum(report.counts().values()) == count, report.findings
    return [finding.reason for finding in report.findings]


@pytest.mark.parametrize(
    ("place", "own", "dtype"),
    sorted({r for r in ROUNDINGS if r[::2] != ("softmax", torch.int8)}, key=str),
)
def test_rounding_to_a_narrower_dtype_is_left(place, own, dtype):
    (reason,) = compare(PLACES[place], own, dtype, 0)
    assert reason is not None and f"is rounded to {dtype}" in reason


@pytest.mark.parametrize(("own", "dtype"), KEPT)
@pytest.mark.parametrize("place", PLACES)
def test_rounding_to_the_dtype_of_the_queries_or_a_wider_one_is_not_noticed(place, own, dtype):
    compare(PLACES[place], own, dtype, 1)


@pytest.mark.parametrize(
    ("own", "dtype", "count"),
    [(torch.float16, torch.float32, 1), (torch.bfloat16, torch.float16, 0)],
)
def test_queries_and_keys_are_taken_from_before_a_cast_that_keeps_them(own, dtype, count):
    code = lambda q, k, v, dtype: (q.to(dtype) @ k.to(dtype).mT * 0.5).softmax(-1).to(v.dtype) @ v
    compare(code, own, dtype, count)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_a_bias_is_taken_as_the_code_rounded_it(dtype):
    bias = lambda q: q.mean(-1)[..., None, :].to(dtype).to(q.dtype)
    compare(lambda q, k, v, _: (scores(q, k) + bias(q)).softmax(-1) @ v, torch.float32, dtype, 1)


def column_of(sinks: Tensor, q: Tensor) -> Tensor:
    return sinks.expand(q.shape[0], -1, q.shape[-2], -1)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    sinks = v.mean((0, 2, 3)).view(1, -1, 1, 1).to(dtype).to(q.dtype)
    raw = torch.cat([scores(q, k) + low(q), column_of(sinks, q)], -1)
    return raw.softmax(-1)[..., :-1] @ v


def with_rounded_sinks(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    sinks = v.mean((0, 2, 3)).to(dtype).to(q.dtype)
    raw = torch.cat([scores(q, k) + low(q), column_of(sinks.view(1, -1, 1, 1), q)], -1)
    return raw.softmax(-1)[..., :-1] @ v


def capped(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    half = torch.tanh(scores(q, k) / 1.5).to(dtype).to(q.dtype)
    return (half * 1.5 + low(q)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("code", "dtype", "count"),
    [
        (with_sinks, torch.float8_e4m3fn, 0),
        (with_sinks, torch.float64, 1),
        (with_rounded_sinks, torch.float8_e4m3fn, 1),
        (capped, torch.bfloat16, 0),
        (capped, torch.float64, 1),
    ],
)
def test_sinks_and_capped_scores(monkeypatch, code, dtype, count):
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(masked_attention, "FLASH_DTYPES", (torch.float32,))
    compare(code, torch.float32, dtype, count, masked_attention.rewrite_unfused)
