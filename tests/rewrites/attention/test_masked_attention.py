"""Attention with a mask of indices and data runs in varlen_attention or in flex_attention, with the
same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from attention_graphs import MASKED, VARLEN, as_it_is, compiled, heads, mask_nodes, results
from data_masks import MASKS, documents, on_the_cpu, positions, right_padding
from liger_ops.ops.attention.packed_documents import DOCUMENT_BOUNDS
from liger_ops.rewrites.attention import causal_attention, masked_attention

OP = masked_attention.OP
LENGTH = 23


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    on_the_cpu(monkeypatch)


def attention_with(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *data: Tensor) -> Tensor:
        seen = mask(query.shape[-2], key.shape[-2], *data)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    return attention


def qkv(queries: int = LENGTH, keys: int | None = None) -> list[Tensor]:
    keys = queries if keys is None else keys
    return [heads(2, 4, n, 16, seed) for seed, n in enumerate((queries, keys, keys))]


def compare(
    function: Callable[..., Tensor], inputs: list[Tensor], count: int = 1, **options: Any
) -> tuple[Any, list[Any]]:
    """Compare values and gradients; the rewrite is made `count` times."""
    both = [causal_attention.rewrite, masked_attention.rewrite]
    options = {"inner": as_it_is, **options}
    rewritten, report, graphs = compiled(function, both, **options)
    for one, other in zip(results(rewritten, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert report.counts().get(OP, 0) == count
    calls = [node for part in graphs for node in part.graph.nodes if node.target in MASKED]
    assert len(calls) == count
    return report, calls


@pytest.mark.quick(rewrites=("masked_attention",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_the_result_is_that_of_the_dense_mask(name, dynamic):
    mask, data = MASKS[name]
    inputs = qkv() + ([data(LENGTH)] if data else [])
    if dynamic:
        for tensor in inputs[:3]:
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
    report, _ = compare(attention_with(mask), inputs)
    assert [finding.reason for finding in report.findings] == [None]


@pytest.mark.parametrize("name", ["window", "packed"])
def test_through_aot_autograd(name):
    mask, data = MASKS[name]
    compare(attention_with(mask), qkv() + ([data(LENGTH)] if data else []), inner=aot_eager)


def test_one_compilation_serves_every_length():
    compilations = []

    def inner(module: Any, inputs: Any) -> Any:
        compilations.append(module)
        return module.forward

    mask, _ = MASKS["packed"]
    attention = attention_with(mask)
    rewritten, report, _ = compiled(attention, [masked_attention.rewrite], None, inner)
    for length in (300, 200, 700, 256):
        inputs = [*qkv(length), documents(length)]
        torch.testing.assert_close(rewritten(*inputs), attention(*inputs))
    assert len(compilations) == 2
    assert report.counts() == {OP: 2}


PADDING = {
    "left": right_padding(LENGTH).flip(-1),
    "holes": right_padding(LENGTH) * (torch.arange(LENGTH) % 3 > 0),
    "both sides": (torch.arange(LENGTH) > 4).int() * right_padding(LENGTH),
    "a row": torch.tensor([[1], [0]]).expand(2, LENGTH),
    "all": torch.zeros(2, LENGTH, dtype=torch.int64),
}


@pytest.mark.parametrize("name", PADDING)
def test_any_padding(name):
    """One program is right for each; a query without a key gets 0, and has no gradient."""
    mask, _ = MASKS["padding"]
    inputs = [*qkv(), PADDING[name]]
    _, (call,) = compare(attention_with(mask), inputs)
    assert call.target is VARLEN
    rewritten, _, _ = compiled(attention_with(mask), [masked_attention.rewrite], inner=as_it_is)
    unseen = PADDING[name].cumsum(-1) == 0
    assert rewritten(*inputs).transpose(1, 2)[unseen].count_nonzero() == 0


POSITIONS = {
    "documents": positions(LENGTH),
    "one document": torch.arange(LENGTH).expand(2, LENGTH) + 5,
    "all alone": torch.arange(LENGTH).flip(0).expand(2, LENGTH),
    "gaps": torch.arange(LENGTH).expand(2, LENGTH) + (torch.arange(LENGTH) > 7),
    "one row": positions(LENGTH)[:1],
}


@pytest.mark.parametrize("mask", ["packed by positions", "packed by positions, a window"])
@pytest.mark.parametrize("name", POSITIONS)
def test_packed_documents(name, mask):
    inputs = [*qkv(), POSITIONS[name]]
    _, (call,) = compare(attention_with(MASKS[mask][0]), inputs)
    assert call.target is VARLEN


# Numbers of which equal ones may not be neighbours, and documents in which positions do not rise by
# 1. The numbers are functions of positions.
NOT_DOCUMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers that fall": lambda p: torch.diff(p, prepend=p[:, :1] - 1).clamp(-1, 1).cumsum(-1),
    "a count along the batch": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) != 1).cumsum(0),
    "a count that wraps": lambda p: (p % 2 == 0).cumsum(-1, dtype=torch.int8),
}
OTHER_POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "another step": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) != 2).cumsum(-1),
    "no differences": lambda p: (torch.diff(p, n=0, prepend=p[:, :1]) != 1).cumsum(-1),
}


@pytest.mark.parametrize("name", NOT_DOCUMENTS | OTHER_POSITIONS)
def test_what_is_no_packing(name):
    numbers = (NOT_DOCUMENTS | OTHER_POSITIONS)[name]

    def mask(q: int, k: int, p: Tensor) -> Tensor:
        ids = numbers(p)
        seen = torch.arange(q)[:, None] >= torch.arange(k)
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
        distance = p[:, None, :, None] - p[:, None, None, :]
        return seen & (distance < 6) if name in OTHER_POSITIONS else seen

    inputs = [*qkv(), positions(LENGTH) * 2 + 250]
    _, (call,) = compare(attention_with(mask), inputs)
    assert call.target is not VARLEN


def _numbers(p: Tensor) -> Tensor:
    """Return the numbers of the documents of positions p."""
    return (torch.diff(p, prepend=p[:, :1] - 1) != 1).cumsum(-1)


def _same(x: Tensor) -> Tensor:
    """Return whether a query and a key have the same number of x."""
    return x[:, None, :, None] == x[:, None, None, :]


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "begins, named": lambda begins: torch.cumsum(input=begins, dim=-1),
    "begins": lambda begins: torch.cumsum(begins, -1),
}


@pytest.mark.parametrize("name", WRITES)
def test_begins_that_are_written_after_they_are_counted(name):
    def mask(q: int, k: int, p: Tensor) -> Tensor:
        begins = torch.diff(p, prepend=p[:, :1] - 1) != 1
        numbers = WRITES[name](begins)
        begins[:, 5:8] = True
        return (torch.arange(q)[:, None] >= torch.arange(k)) & _same(numbers)

    compare(attention_with(mask), [*qkv(), positions(LENGTH)], 0)


def test_begins_by_rounded_differences():
    def mask(q: int, k: int, p: Tensor) -> Tensor:
        # In float16 2049 - 2047 is 1.
        numbers = (torch.diff(p, prepend=p[:, :1].half() - 1) != 1).cumsum(-1)
        distance = p[:, None, :, None] - p[:, None, None, :]
        return (torch.arange(q)[:, None] >= torch.arange(k)) & _same(numbers) & (distance < 3)

    rises = torch.arange(LENGTH).repeat(2, 1) + 2030
    rises[:, 18:] += 1
    _, (call,) = compare(attention_with(mask), [*qkv(), rises])
    assert call.target is not VARLEN


@pytest.mark.parametrize("name", ["packed by positions", "padding"])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (1, 3)])
def test_a_mask_of_one_row_and_batches_of_several_sizes(name, counts):
    mask, data = MASKS[name]

    def attention(query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Tensor:
        seen = mask(LENGTH, LENGTH, row)
        parts = [
            F.scaled_dot_product_attention(
                *(x[:1].repeat(n, 1, 1, 1) for x in (query, key, value)), seen
            )
            for n in counts
        ]
        return torch.cat(parts)

    assert data is not None
    compare(attention, [*qkv(), data(LENGTH)[1:]], 2)


# What positions p ask of a query and a key, beside documents or in place of them.
BEYOND_DOCUMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "keys of earlier documents": lambda p: _at_most(_numbers(p)),
    "keys of later documents": lambda p: _at_most(-_numbers(p)) & _at_most(p),
    "numbers of the other row": lambda p: (
        _numbers(p)[:, None, :, None] == _numbers(p).flip(0)[:, None, None, :]
    ),
    "numbers of a row for each head": lambda p: _same(_numbers(torch.cat((p, p)))).view(
        1, 4, LENGTH, LENGTH
    ),
    "those of the other row too": lambda p: _same(_numbers(p)) & _same(_numbers(p).flip(0)),
    "chunks of positions": lambda p: _same(_numbers(p)) & _same(p // 8),
    "hidden keys": lambda p: _same(_numbers(p)) & (p[:, None, None, :] % 3 > 0),
}


def _at_most(x: Tensor) -> Tensor:
    """Return whether a key's number of x is at most the query's."""
    return x[:, None, None, :] <= x[:, None, :, None]


@pytest.mark.parametrize("name", BEYOND_DOCUMENTS)
def test_documents_and_something_else(name):
    def mask(q: int, k: int, p: Tensor) -> Tensor:
        shown = BEYOND_DOCUMENTS[name](p)
        # Where positions say which keys are earlier, indices do not.
        is_causal = torch.arange(q)[:, None] >= torch.arange(k)
        return shown if name == "keys of later documents" else shown & is_causal

    _, (call,) = compare(attention_with(mask), [*qkv(), positions(LENGTH)])
    assert call.target is not VARLEN


@pytest.mark.parametrize("name", ["window", "chunks"])
def test_repeated_heads_are_not_copied(name):
    mask, _ = MASKS[name]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (one.repeat_interleave(4, dim=1) for one in (key, value))
        return attention_with(mask)(query, key, value)

    inputs = [heads(2, n, LENGTH, 16, n) for n in (8, 2, 2)]
    _, (call,) = compare(attention, inputs)
    heads_of = [node.meta["example_value"].shape[1] for node in call.args[1:3]]
    assert heads_of == [2, 2]


@pytest.mark.parametrize("name", ["padding", "packed"])
def test_layers_share_a_block_mask_or_documents(name):
    mask, data_of = MASKS[name]

    def attention(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        seen = mask(LENGTH, LENGTH, data)
        for _ in range(3):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3)
        return query

    _, calls = compare(attention, [*qkv(), data_of(LENGTH)], 3)
    assert len(set(map(mask_nodes, calls))) == 1


def test_the_mask_is_dropped_from_the_graph():
    mask, _ = MASKS["padding"]
    _, (call,) = compare(attention_with(mask), [*qkv(), right_padding(LENGTH)])
    shapes = [node.meta.get("example_value") for node in call.graph.nodes]
    assert not any(getattr(x, "shape", ())[-2:] == (LENGTH, LENGTH) for x in shapes)


@pytest.mark.parametrize("name", ["window", "packed", "padding"])
def test_checkpointed_blocks_take_the_block_mask_of_the_graph(name):
    mask, data = MASKS[name]

    def block(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).sin()

    def attention(query: Tensor, key: Tensor, value: Tensor, *data: Tensor) -> Tensor:
        seen = mask(LENGTH, LENGTH, *data)
        for _ in range(2):
            query = torch.utils.checkpoint.checkpoint(
                block, query, key, value, seen, use_reentrant=False
            )
        return query

    compare(attention, qkv() + ([data(LENGTH)] if data else []), 2, inner=aot_eager)


def test_under_autocast():
    mask, _ = MASKS["window"]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention_with(mask)(query, key, value)

    rewritten, report, _ = compiled(attention, [masked_attention.rewrite], inner=as_it_is)
    actual, expected = rewritten(*qkv()), attention(*qkv())
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert report.counts() == {OP: 1}


def _written(q: int, k: int, mask: Tensor) -> Tensor:
    mask = mask.clone()
    seen = MASKS["padding"][0](q, k, mask)
    mask.zero_()
    return seen


def _learned(q: int, k: int, bias: Tensor) -> Tensor:
    return MASKS["window, added"][0](q, k) + bias


LEFT: dict[str, tuple[Callable[..., Tensor], Tensor, str]] = {
    "dense": (
        lambda q, k, seen: seen,
        torch.rand(2, 1, LENGTH, LENGTH) > 0.3,
        "is an input of the graph|for each query and key",
    ),
    "of two dimensions": (
        lambda q, k, seen: seen,
        torch.rand(LENGTH, LENGTH) > 0.3,
        "for each query and key",
    ),
    "written in place": (_written, right_padding(LENGTH), "written in place"),
    "a bias": (_learned, torch.rand(LENGTH, LENGTH), "cannot be analysed"),
    "added, with unseen queries": (
        lambda q, k, mask: torch.where(MASKS["padding"][0](q, k, mask), 0.0, -1e38),
        right_padding(LENGTH).flip(-1),
        "a query that sees no key",
    ),
    "floating-point data": (
        lambda q, k, limit: causal_before(q, k, limit),
        torch.rand(2, LENGTH) * LENGTH,
        "for each query and key",
    ),
}


def causal_before(q: int, k: int, limit: Tensor) -> Tensor:
    return torch.arange(k)[None, None, None, :] < limit[:, None, :, None]


@pytest.mark.parametrize("name", LEFT)
def test_a_near_miss_is_left(name):
    mask, data, reason = LEFT[name]
    rewritten, report, _ = compiled(
        attention_with(mask), [masked_attention.rewrite], inner=as_it_is
    )
    inputs = [*qkv(), data]
    torch.testing.assert_close(rewritten(*inputs), attention_with(mask)(*inputs))
    (finding,) = report.findings
    assert not finding.used
    assert any(part in finding.reason for part in reason.split("|")), finding.reason


def test_dropout_is_left():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = MASKS["window"][0](LENGTH, LENGTH)
        return F.scaled_dot_product_attention(query, key, value, seen, dropout_p=0.5)

    rewritten, report, _ = compiled(attention, [masked_attention.rewrite], inner=as_it_is)
    rewritten(*qkv())
    assert [finding.used for finding in report.findings] == [False]


def test_short_sequences_are_left(monkeypatch):
    on_the_cpu(monkeypatch, least_keys=LENGTH + 1)
    attention = attention_with(MASKS["window"][0])
    rewritten, report, _ = compiled(attention, [masked_attention.rewrite], inner=as_it_is)
    rewritten(*qkv())
    (finding,) = report.findings
    assert "as fast" in finding.reason


def test_a_device_without_a_fast_kernel_is_left(monkeypatch):
    monkeypatch.undo()
    attention = attention_with(MASKS["window"][0])
    rewritten, report, _ = compiled(attention, [masked_attention.rewrite], inner=as_it_is)
    rewritten(*qkv())
    assert report.findings == []


@pytest.mark.parametrize("name", ["window", "padding", "packed by positions", "chunks"])
def test_a_device_whose_engine_takes_documents_alone(name, monkeypatch):
    """As an NPU: all layers are given the documents on the host, and other masks are left."""
    on_the_cpu(monkeypatch, has_flex=False)
    mask, data = MASKS[name]
    report, calls = compare(
        attention_with(mask), qkv() + ([data(LENGTH)] if data else []), name != "chunks"
    )
    reason = "its mask is not one of padding, causal windows and packed documents"
    assert report.findings[-1].reason == (None if calls else reason)
    # The last argument.
    for bounds in (call.args[-1] for call in calls):
        assert bounds.target is DOCUMENT_BOUNDS
