"""The blocks of a mask that show something and hide nothing, in a graph that a rewrite makes, and
the documents of a packed batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from attention_graphs import as_it_is
from causal_masks import causal
from data_masks import MASKS, documents, positions, prefixes, right_padding
from index_programs import masks
from liger_ops.ops.attention.packed_documents import PACKED_DOCUMENTS
from liger_ops.rewrites.attention.flex_attention import emit_block_mask
from liger_ops.rewrites.attention.mask import blocks as mask_blocks
from liger_ops.rewrites.attention.mask.blocks import dense_datum
from liger_ops.rewrites.attention.mask.evaluate import IndexFunctions, Scope
from liger_ops.rewrites.attention.mask.proof import visible_keys
from liger_ops.rewrites.engine.canonical import value
from liger_ops.rewrites.engine.insertion import Emitter
from liger_ops.rewrites.engine.maps.algebra import Unknown, data_of

BLOCK, BATCH, HEADS = 4, 2, 3
Lists = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(mask_blocks, "BLOCK", BLOCK)


def blocks_of(
    mask: Callable[..., Tensor], queries: int, keys: int, *data: Tensor, inner: Any = as_it_is
) -> tuple[Tensor, Tensor, list[Lists]] | None:
    """The mask, its predicate at every index, and its lists of blocks; None if it is unknown."""
    extra: list[Any] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        (node,) = output.args[0]
        functions = IndexFunctions(data=True)
        try:
            condition = visible_keys(functions.value(node))
        except Unknown:
            return module.forward
        if isinstance(condition, bool) or dense_datum(data_of(condition)) is not None:
            return module.forward
        sizes = {-4: BATCH, -3: HEADS, -2: queries, -1: keys}
        scope, emit = Scope(module.graph, functions), Emitter(output, value(node))
        made = emit_block_mask(emit, condition, sizes, scope, torch.device("cpu"))
        output.args = ((node, *made.lists.values(), *made.data),)
        module.recompile()
        run = inner(module, inputs)
        extra.append(made.predicate)

        def first(*args: Any) -> Any:
            results = run(*args)
            extra.append(results)
            return results[:1]

        return first

    torch._dynamo.reset()
    seen = torch.compile(mask, backend=backend)(queries, keys, *data)
    if not extra:
        return None
    module, (_, *results) = extra
    lists, tensors = results[:8], results[8:]
    places = torch.meshgrid(*map(torch.arange, (BATCH, HEADS, queries, keys)), indexing="ij")
    return seen, module(*places, *tensors), list(zip(lists[::2], lists[1::2], strict=True))


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks a list names."""
    kept = torch.arange(indices.shape[-1]) < counts[..., None]
    return (F.one_hot(indices.long(), indices.shape[-1]).bool() & kept[..., None]).any(-2)


def check(mask: Callable[..., Tensor], queries: int, keys: int, *data: Tensor, **options) -> bool:
    found = blocks_of(mask, queries, keys, *data, **options)
    if found is None:
        return False
    seen, predicted, lists = found
    shape = (BATCH, HEADS, queries, keys)
    if seen.is_floating_point():
        seen = seen == 0
    assert torch.equal(predicted, seen.expand(shape))
    partial, columns, full, full_columns = (listed(*one) for one in lists)
    assert torch.equal(columns.mT, partial) and torch.equal(full_columns.mT, full)
    padded = F.pad(seen.expand(shape), (0, -keys % BLOCK, 0, -queries % BLOCK))
    tiles = padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    some, every = tiles.any(-1).any(-2), tiles.all(-1).all(-2)
    assert torch.equal((full & ~partial).expand_as(every), every)
    assert torch.equal((full ^ partial).expand_as(some), some)
    return True


@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_of_a_mask(name):
    mask, data = MASKS[name]
    for length in (4 * BLOCK, 23):
        assert check(mask, length, length, *([data(length)] if data else []))


def test_through_inductor():
    """The order of the blocks is made by the graph, so Inductor compiles it."""
    from torch._inductor.compile_fx import compile_fx

    mask, _ = MASKS["packed"]
    assert check(mask, 23, 23, documents(23), inner=compile_fx)


DATA = st.sampled_from(
    [("padding", right_padding), ("packed", documents), ("prefix", prefixes)]
    + [("packed by positions", positions)]
)


@settings(max_examples=40)
@given(masks(), DATA, st.sampled_from(["and", "or", "not"]), st.integers(9, 20))
def test_the_blocks_of_a_random_mask(program, named, how, length):
    """A program of indices, combined with a mask that reads data."""
    name, make = named
    read = MASKS[name][0]

    def mask(q: int, k: int, data: Tensor) -> Tensor:
        left, right = program(q, k), read(q, k, data)
        left = left if left.dtype == torch.bool else left == 0
        if how == "or":
            return left | right
        return left & (~right if how == "not" else right)

    event(f"read: {check(mask, length, length, make(length))}")


def test_a_mask_of_an_input_has_no_blocks():
    assert blocks_of(lambda q, k, seen: seen & causal(q, k), 8, 8, torch.ones(8, 8) > 0) is None


@given(rows=st.integers(1, 3), length=st.integers(0, 9), data=st.data())
def test_packed_documents(rows: int, length: int, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
    begins = torch.tensor(data.draw(flags), dtype=torch.bool).view(rows, length)
    before = begins.clone()
    cu_seqlens, bounds = PACKED_DOCUMENTS(begins)
    starts = [
        row * length + token
        for row in range(rows)
        for token in range(length)
        if token == 0 or begins[row, token]
    ]
    total = rows * length
    assert cu_seqlens.tolist() == starts + [total] * (total + 1 - len(starts))
    longest = max((end - start for start, end in pairwise([*starts, total])), default=0)
    assert bounds.tolist() == [len(starts), longest]
    assert torch.equal(begins, before)


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "expanded"])
def test_opcheck_of_packed_documents(strides: str) -> None:
    begins = torch.rand(4, 6) < 0.3
    begins = {"transposed": begins.t(), "expanded": begins[:1].expand(4, 6)}.get(strides, begins)
    torch.library.opcheck(PACKED_DOCUMENTS, (begins,))
