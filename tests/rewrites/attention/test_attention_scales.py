"""Attention whose scores are multiplied by numbers that no engine takes: masks stay as they are."""

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
REWRITES = [
    sdpa.rewrite, causal_attention.rewrite, masked_attention.rewrite,
    masked_attention.rewrite_unfused,
]  # fmt: skip
Code = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def seen(q: Tensor) -> Tensor:
    return causal(q.shape[-2], q.shape[-2])


def low(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[-2], q.shape[-2]).masked_fill(~seen(q), -torch.inf)


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


def compare(monkeypatch: Any, code: Code, scale: Any, dynamic: bool = False) -> dict[str, int]:
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
    assert compare(monkeypatch, CODES[name], scale) == {}


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, 0.3) for name in CODES), ("product", 2), ("boolean", True)]
)
def test_a_number_that_is_a_scale(monkeypatch, name, scale):
    assert compare(monkeypatch, CODES[name], scale)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [torch.tensor(-0.3), nn.Parameter(torch.tensor(-0.3))])
def test_a_tensor_as_a_scale(monkeypatch, scale, dynamic):
    assert compare(monkeypatch, CODES["product"], scale, dynamic) == {}


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
    compare(monkeypatch, code, None)


def test_a_number_in_a_tensor_is_what_the_tensor_stores():
    graph: Any = torch.fx.Graph()
    for dtype, stored in ((torch.float32, 2.7), (torch.bfloat16, 2.703125), (torch.int32, None)):
        node = graph.call_function(torch.tensor, (2.7,), {"dtype": dtype})
        node.meta["example_value"] = torch.tensor(2.7, dtype=dtype)
        assert constant(node) == (stored and pytest.approx(stored, abs=1e-7))
    assert not any(map(is_scale, (*NO_SCALES, -math.inf, 1e39, 1e-50, None)))
    assert all(map(is_scale, (0.3, 1, 1e30)))
