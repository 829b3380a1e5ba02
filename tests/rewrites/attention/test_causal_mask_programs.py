"""Proofs about masks hold for random programs that compute the mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from attention_graphs import as_it_is, attention_options, compiled, heads
from causal_masks import OP, Mask, causal, columns, rows
from index_programs import conditions, masks, value_at
from liger_ops.rewrites.attention import causal_attention
from liger_ops.rewrites.attention.mask.evaluate import IndexFunctions
from liger_ops.rewrites.attention.mask.proof import departure, everywhere, visible_keys, window
from liger_ops.rewrites.engine.maps.algebra import Unknown, is_condition


@settings(max_examples=40)
@given(masks(), st.integers(2, 5), st.integers(2, 5), st.booleans())
def test_a_mask_is_dropped_only_if_it_is_causal_or_hides_nothing(program, queries, keys, dynamic):
    """With dynamic shapes, also at sizes that were not traced."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = program(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    rewritten, report, graphs = compiled(attention, [causal_attention.rewrite], dynamic, as_it_is)
    with torch.no_grad():
        rewritten(*(heads(2, 3, n, size=4) for n in (queries, keys, keys)))
    if report.counts().get(OP):
        (options,) = attention_options(graphs)
        sizes = [(queries, keys)]
        if dynamic:
            sizes += [(queries + n, keys + n) for n in (1, 3, 12)]
        for q, k in sizes:
            expected = causal(q, k) if options else torch.ones(q, k, dtype=torch.bool)
            torch.testing.assert_close(program(q, k).expand(q, k), expected)


@settings(max_examples=500)
@given(conditions(), st.integers(1, 6), st.integers(1, 6))
def test_what_is_proved_holds_at_every_index(condition, queries, keys):
    seen = [[value_at(condition, (i, j)) for j in range(keys)] for i in range(queries)]
    is_causal = seen == [[j <= i for j in range(keys)] for i in range(queries)]
    proved = departure(condition, (2, 3, queries, keys)) is None
    assert is_causal or not proved
    event(f"causal: {is_causal}, proved: {proved}")


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (lambda q, k: causal(q, k) & (rows(q) - columns(k) < 3), 3),
        (lambda q, k: rows(q) == columns(k), 1),
        (lambda q, k: (columns(k) < rows(q)) & (rows(q) - columns(k) < 3), None),
        (lambda q, k: rows(q) - columns(k) < 3, None),
        (lambda q, k: causal(q, k) & (rows(q) - columns(k) < 3) & (columns(k) != 2), None),
    ],
    ids=["window", "window of one", "hides its own key", "shows later keys", "hides a key"],
)
def test_a_window_is_proved(mask: Mask, size: int | None) -> None:
    """FlashAttention is given its size in place of the mask."""
    found = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        (output,) = module.graph.find_nodes(op="output")
        visible = visible_keys(IndexFunctions().value(output.args[0][0]))
        found.append(window(visible, output.args[0][0].meta["example_value"].shape))
        return module.forward

    torch._dynamo.reset()
    torch.compile(mask, backend=backend)(6, 7)
    assert found == [size]


@settings(max_examples=60)
@given(masks(), st.integers(1, 4), st.integers(1, 4))
def test_a_function_of_indices_is_what_the_graph_computes(program, queries, keys):
    """For every node with a function, at every index; and every decision about it."""
    captured: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        captured.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend)(queries, keys)
    functions = IndexFunctions()

    class Comparison(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            actual = super().run_node(node)
            if node.op.startswith("call_") and isinstance(actual, Tensor):
                try:
                    value = functions.value(node)
                except Unknown:
                    return actual
                for place in itertools.product(*map(range, actual.shape)):
                    assert value_at(value, place) == actual[place].item()
                if is_condition(value):
                    decision = everywhere(actual.shape).decide(value)
                    assert decision is None or bool((actual == decision).all())
            return actual

    for module in captured:
        Comparison(module).run()
