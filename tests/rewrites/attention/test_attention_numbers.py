"""Attention whose code rounds, and whose scores are multiplied by numbers that no engine takes.

Kernels round less often than code that rounds to the dtype of its queries. No kernel rounds to a
narrower dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_graphs import as_it_is, compiled, heads, results
from causal_masks import causal
from data_masks import on_the_cpu
from liger_ops.accepted import is_scale
from liger_ops.rewrites.attention import causal_attention, masked_attention, sdpa
from liger_ops.rewrites.attention.numbers import constant

LENGTH = 6
# From queries, keys, values, and a dtype or a number.
Code = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


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


REWRITES = [
    sdpa.rewrite, causal_attention.rewrite, masked_attention.rewrite,
    masked_attention.rewrite_unfused,
]  # fmt: skip


def seen(q: Tensor) -> Tensor:
    return causal(q.shape[-2], q.shape[-2])


def window(q: Tensor) -> Tensor:
    return seen(q).triu(-2)


def added_product(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> Tensor:
    bias = torch.zeros(q.shape[0] * q.shape[1], LENGTH, LENGTH)
    raw = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return (raw.view(*q.shape[:2], LENGTH, LENGTH) + low(q)).softmax(-1) @ v


def call(mask: Callable[[Tensor], Tensor]) -> Code:
    return lambda q, k, v, scale: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask(q), scale=scale
    )


CODES: dict[str, Code] = {
    "boolean": call(seen),
    "added": call(low),
    "window": call(window),
    "product": lambda q, k, v, scale: (q @ k.mT * scale + low(q)).softmax(-1) @ v,
    "quotient": lambda q, k, v, scale: ((q @ k.mT) / scale + low(q)).softmax(-1) @ v,
    "baddbmm": added_product,
    "twice": lambda q, k, v, scale: ((q @ k.mT) * scale * scale + low(q)).softmax(-1) @ v,
    "capped": lambda q, k, v, cap: (torch.tanh(q @ k.mT / cap) * cap + low(q)).softmax(-1) @ v,
}
NO_SCALES = (-0.3, 0.0, -0.0, math.inf, math.nan, 1e-42)


def replaced(monkeypatch: Any, code: Code, scale: Any, dynamic: bool = False) -> dict[str, int]:
    """Compare results and gradients; return what was rewritten."""
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(masked_attention, "FLASH_DTYPES", (torch.float32,))
    inputs = [heads(2, 4, LENGTH, 16, seed) for seed in range(3)]
    function = lambda q, k, v: code(q, k, v, scale)
    rewritten, report, _ = compiled(function, REWRITES, dynamic, inner=as_it_is)
    for one, other in zip(results(rewritten, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=1e-4, rtol=1e-4)
    return report.counts()


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *((name, scale) for name in CODES for scale in NO_SCALES[:2]),
        *((name, scale) for name in ("boolean", "product") for scale in NO_SCALES[2:]),
    ],
)
def test_a_number_that_is_no_scale(monkeypatch, name, scale):
    assert replaced(monkeypatch, CODES[name], scale) == {}


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, 0.3) for name in CODES), ("product", 2), ("boolean", True)]
)
def test_a_number_that_is_a_scale(monkeypatch, name, scale):
    assert replaced(monkeypatch, CODES[name], scale)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [torch.tensor(-0.3), nn.Parameter(torch.tensor(-0.3))])
def test_a_tensor_as_a_scale(monkeypatch, scale, dynamic):
    assert replaced(monkeypatch, CODES["product"], scale, dynamic) == {}


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_symbolic(scale):
    """The graph is compiled for a positive number, and called with another."""
    function, inputs = CODES["boolean"], [heads(2, 4, LENGTH, 16, seed) for seed in range(3)]
    rewritten, _, _ = compiled(function, REWRITES, True, inner=as_it_is)
    for number in (0.3, 0.5, scale):
        torch.testing.assert_close(rewritten(*inputs, number), function(*inputs, number))


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.5])
def test_slopes_of_any_sign(monkeypatch, slope):
    places = torch.arange(float(LENGTH))
    code = lambda q, k, v, _: (q @ k.mT * 0.3 + slope * places + low(q)).softmax(-1) @ v
    replaced(monkeypatch, code, None)


def test_a_number_in_a_tensor_is_what_the_tensor_stores():
    graph: Any = torch.fx.Graph()
    for dtype, stored in ((torch.float32, 2.7), (torch.bfloat16, 2.703125), (torch.int32, None)):
        node = graph.call_function(torch.tensor, (2.7,), {"dtype": dtype})
        node.meta["example_value"] = torch.tensor(2.7, dtype=dtype)
        assert constant(node) == (stored and pytest.approx(stored, abs=1e-7))
    assert not any(map(is_scale, (*NO_SCALES, -math.inf, 1e39, 1e-50, None)))
    assert all(map(is_scale, (0.3, 1, 1e30)))
