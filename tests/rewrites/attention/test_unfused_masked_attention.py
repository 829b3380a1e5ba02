"""Attention that is written out with a soft cap, sinks or padding runs in varlen_attention or in
flex_attention, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from attention_graphs import MASKED, as_it_is, compiled, heads, mask_nodes, results
from attention_models import batch, model, step
from causal_masks import causal
from data_masks import MASKS, documents, on_the_cpu, right_padding
from index_programs import masks
from liger_ops.rewrites.attention import masked_attention, sdpa
from rewriting import Rewriter

OP = masked_attention.UNFUSED
REWRITES = [sdpa.rewrite, masked_attention.rewrite_unfused]
LENGTH = 23
CAP = 1.5


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    on_the_cpu(monkeypatch)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    monkeypatch.setattr(masked_attention, "FLASH_DTYPES", dtypes)


def copies(x: Tensor, times: int) -> Tensor:
    """As transformers repeats the heads of keys and values."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """As transformers makes masks for attention that it writes out."""
    return torch.where(seen, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """As Gemma 2 writes it with a cap, and GPT-OSS with sinks."""
    key, value = (copies(x, query.shape[1] // x.shape[1]) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.3
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        scores = torch.cat([scores, column], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights.to(value.dtype), value).transpose(1, 2).contiguous()


def qkv(length: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(4, length), (2, length), (2, length)]
    return [heads(2, *shape, 16, seed).to(dtype) for seed, shape in enumerate(shapes)]


def sink_of_each_head(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([-1.0, 0.5, 2.0, 3.0], dtype=dtype)


Function = Callable[..., Tensor]


def masked(name: str, has_sinks: bool, cap: float | None) -> Function:
    """Attention with a mask of `MASKS`; its arguments are q, k, v, the sinks if any, and data."""
    mask, _ = MASKS[name]

    def function(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        sinks, data = (others[0], others[1:]) if has_sinks else (None, others)
        seen = mask(query.shape[-2], key.shape[-2], *data)
        seen = added(seen, query.dtype) if seen.dtype == torch.bool else seen
        return attention(query, key, value, seen, sinks, cap)

    return function


def compare(
    function: Function, inputs: list[Tensor], count: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Compare values and gradients; the rewrite is made `count` times."""
    rewritten, report, graphs = compiled(function, REWRITES, **{"inner": as_it_is, **options})
    for one, other in zip(results(rewritten, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert report.counts() == ({OP: count} if count else {}), report.findings
    calls = [node for part in graphs for node in part.graph.nodes if node.target in MASKED]
    assert len(calls) == count
    return report, calls


# scaled_dot_product_attention takes what has neither, unless a query may see no key.
WITH = {"sinks": (True, None), "cap": (False, CAP), "sinks and cap": (True, CAP)}
WITH |= {"neither": (False, None)}
ADDED = list(WITH)[:3]
HIDES = {name for name in MASKS if "padding" in name or name == "bool"}
PADDED = ("padding on the left", "chunks after padding")
# Each mask with sinks, with a cap or with both, in turn. Masks of padding may hide every key of a
# query.
CASES = [
    *((name, ADDED[place % len(ADDED)]) for place, name in enumerate(MASKS)),
    *((name, what) for name in PADDED for what in ("cap", "neither")),
]


def inputs_of(
    name: str, what: str, length: int = LENGTH, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    data = MASKS[name][1]
    sinks = [sink_of_each_head(dtype)] if WITH[what][0] else []
    return [*qkv(length, dtype), *sinks, *([data(length)] if data else [])]


@pytest.mark.quick(rewrites=("eager_attention",))
@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_result_is_that_of_the_code(name, what):
    """In float64, with the gradients of queries, keys, values and sinks."""
    report, (call,) = compare(masked(name, *WITH[what]), inputs_of(name, what))
    assert [finding.reason for finding in report.findings] == [None]
    # The heads of keys and values are not copied.
    assert [node.meta["example_value"].shape[1] for node in call.args[:3]] == [4, 2, 2]
    tensors = [node.meta.get("example_value") for node in call.graph.nodes]
    dense = [x for x in tensors if getattr(x, "shape", ())[-2:] == (LENGTH, LENGTH)]
    # Queries that see no key are found by a reduction, into which Inductor fuses the mask.
    assert not dense or (name in HIDES and not WITH[what][0])
    assert not any(x.is_floating_point() for x in dense)


@settings(max_examples=15)
@given(masks(), st.integers(2, 5), st.integers(2, 5), st.sampled_from(list(WITH)))
def test_random_masks(program, queries, keys, what):
    """Replaced or left, with masks that a query may not see any key through."""
    has_sinks, cap = WITH[what]

    def function(query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        seen = added(program(query.shape[-2], key.shape[-2]), query.dtype)
        return attention(query, key, value, seen, *(sinks or [None]), cap=cap)

    inputs = [heads(2, 4, queries, 16).double(), *qkv(keys)[1:]]
    inputs += [sink_of_each_head()] if has_sinks else []
    rewritten, report, _ = compiled(function, REWRITES, inner=as_it_is)
    for one, other in zip(results(rewritten, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(one, other)
    event(f"{what}: {[finding.reason for finding in report.findings]}")


@pytest.mark.parametrize(("name", "what"), [("packed", "sinks and cap"), ("padding", "cap")])
def test_through_aot_autograd(name, what):
    inputs = inputs_of(name, what, dtype=torch.float32)
    compare(masked(name, *WITH[what]), inputs, inner=aot_eager)


@pytest.mark.parametrize("what", ADDED)
def test_without_a_mask(what):
    has_sinks, cap = WITH[what]
    function = lambda q, k, v, *sinks: attention(q, k, v, None, *(sinks or [None]), cap=cap)
    compare(function, [*qkv(), *([sink_of_each_head()] if has_sinks else [])])


def test_two_masks():
    """A mask that is added, and one that fills scores."""

    def function(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        key, value = copies(key, 2), copies(value, 2)
        scores = (query @ key.transpose(2, 3)).tanh() * CAP
        scores = scores + added(causal(LENGTH, LENGTH), scores.dtype)
        other = ids[:, None, :, None] != ids[:, None, None, :]
        return scores.masked_fill(other, -torch.inf).softmax(-1) @ value

    compare(function, [*qkv(), documents(LENGTH)])


@pytest.mark.parametrize("name", ["padding", "packed"])
def test_layers_share_a_block_mask_or_documents(name):
    def layers(query: Tensor, *others: Tensor) -> Tensor:
        seen = added(MASKS[name][0](LENGTH, LENGTH, others[-1]), query.dtype)
        for _ in range(3):
            query = attention(query, *others[:2], seen, others[2]).transpose(1, 2)
        return query

    _, calls = compare(layers, inputs_of(name, "sinks"), 3)
    assert len(set(map(mask_nodes, calls))) == 1


def test_checkpointed_blocks():
    """The block mask is computed outside of them, with the queries that see no key."""

    def layers(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        seen = added(MASKS["padding"][0](LENGTH, LENGTH, mask), query.dtype)
        block = lambda query: attention(query, key, value, seen, None, CAP).transpose(1, 2)
        for _ in range(2):
            query = torch.utils.checkpoint.checkpoint(block, query, use_reentrant=False)
        return query

    inputs = inputs_of("padding on the left", "cap", dtype=torch.float32)
    compare(layers, inputs, 2, inner=aot_eager)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16(autocast):
    """Nearer to the truth than the code, which rounds scores and weights to bfloat16."""
    what = "sinks and cap"
    dtype = torch.float32 if autocast else torch.bfloat16
    inputs = inputs_of("packed", what, dtype=dtype)
    written = masked("packed", *WITH[what])

    def function(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return written(*inputs)

    rewritten, report, _ = compiled(function, REWRITES)
    exact = results(written, [x.double() if x.is_floating_point() else x for x in inputs])
    found, before = results(rewritten, inputs), results(function, inputs)
    assert report.counts() == {OP: 1}
    for y, own, truth in zip(found, before, exact, strict=True):
        assert y.dtype == own.dtype
        error, limit = ((one - truth).norm() / truth.norm() for one in (y, own))
        assert error <= 2 * limit + 2**-9


@pytest.mark.parametrize("kind", ["bare", "left"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models(name, kind):
    """As transformers has them, with every logit, of padding too, and every gradient."""
    # Gemma 2 computes its softmax in float32, in which the lowest float64 is infinite.
    made, inputs = model(name, torch.float32), batch(kind, 40)
    found = Rewriter([sdpa.OP, OP])
    torch._dynamo.reset()
    y = step(made, inputs, torch.compile(made, backend=found))
    assert found.counts() == {OP: 2}
    torch.testing.assert_close(y, step(made, inputs), rtol=1e-3, atol=1e-5)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention(q, k, v, MASKS["window, added"][0](LENGTH, LENGTH) + bias, cap=CAP)


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return attention(q, k, v, added(seen, q.dtype), cap=CAP)


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    seen = MASKS["padding"][0](LENGTH, LENGTH, mask)
    mask.zero_()
    return attention(q, k, v, added(seen, q.dtype), sink_of_each_head())


def _infinite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    seen = MASKS["padding"][0](LENGTH, LENGTH, mask)
    return attention(q, k, v, torch.where(seen, 0.0, -torch.inf), cap=CAP)


def _filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query without a key gives scores no gradient."""
    seen = MASKS["padding"][0](LENGTH, LENGTH, mask)
    return ((q @ copies(k, 2).mT).tanh().masked_fill(~seen, -1e30)).softmax(-1) @ copies(v, 2)


def _narrow(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The lowest float64 is infinite in the float32 of the softmax."""
    seen = added(MASKS["padding"][0](LENGTH, LENGTH, mask), torch.float64)
    q, k, v = (x.float() for x in (q, k, v))
    weights = ((q @ copies(k, 2).mT).tanh() + seen).softmax(-1, dtype=torch.float32)
    return weights @ copies(v, 2)


def _low(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    seen = mask.bool()[:, None, None]
    return ((q @ copies(k, 2).mT).tanh().masked_fill(~seen, -9.0)).softmax(-1) @ copies(v, 2)


LEFT: dict[str, tuple[Function, Tensor, str]] = {
    "a bias": (_biased, torch.rand(LENGTH, LENGTH), "its mask has a gradient"),
    "dense": (_dense, torch.rand(LENGTH, LENGTH) > 0.3, "for each query and key"),
    "written in place": (_written, right_padding(LENGTH), "written in place"),
    "a fill that hides little": (_low, right_padding(LENGTH), "not low enough"),
    "queries that are NaN": (_infinite, right_padding(LENGTH).flip(-1), "not the same finite"),
    "queries that are filled": (_filled, right_padding(LENGTH).flip(-1), "not one that is added"),
    "queries that become NaN": (_narrow, right_padding(LENGTH).flip(-1), "not the same finite"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_near_miss_is_left(name):
    function, data, reason = LEFT[name]
    report, _ = compare(function, [*qkv(), data], 0)
    (finding,) = [one for one in report.findings if one.op == OP]
    assert reason in finding.reason


def test_a_device_without_a_fast_kernel_is_left(monkeypatch):
    monkeypatch.setattr(masked_attention, "DEVICES", {"cuda": True})
    report, _ = compare(masked("window", False, CAP), qkv(), 0)
    assert {finding.op for finding in report.findings} == {sdpa.OP}


def test_a_cap_that_a_device_does_not_take_is_left(monkeypatch):
    monkeypatch.setattr(masked_attention, "DEVICES", {"cpu": False})
    inputs = qkv()
    sinks = torch.zeros(inputs[0].shape[1], dtype=inputs[0].dtype)
    assert compare(masked("window", True, None), [*inputs, sinks], 1)
    report, _ = compare(masked("window", False, CAP), qkv(), 0)
    (finding,) = [one for one in report.findings if one.op == OP]
    assert finding.reason == "it has a soft cap, which the engine on cpu does not take"
