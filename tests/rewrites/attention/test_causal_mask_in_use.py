"""The graph around a causal mask: its other uses, several calls, autocast, checkpointed blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from attention_graphs import attention_options, compiled, qkv, results
from causal_masks import LENGTH, causal, check, columns, rows, transformers_packed, with_mask
from liger_ops.rewrites.attention import causal_attention


def test_a_mask_with_another_use_stays():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(query.shape[-2], key.shape[-2])
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return torch.cat([y, mask.float().expand(2, 4, -1, -1)], -1)

    check(attention, qkv(LENGTH), 1)


def test_the_mask_is_dropped_from_the_graph():
    rewritten, _, graphs = compiled(with_mask(transformers_packed), [causal_attention.rewrite])
    rewritten(*qkv(LENGTH))
    (graph,) = graphs
    assert [node.op for node in graph.graph.nodes] == 3 * ["placeholder"] + [
        "call_function",
        "output",
    ]


def test_one_mask_for_several_calls():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(LENGTH, LENGTH)
        window = mask & (columns(LENGTH) > rows(LENGTH) - 2)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
        y = F.scaled_dot_product_attention(y, key, value, window)
        y = F.scaled_dot_product_attention(y, key, value, mask, 0.0, False)
        y = F.scaled_dot_product_attention(y, key, value, is_causal=True)
        return y

    rewritten, report, graphs = compiled(attention, [causal_attention.rewrite])
    for one, other in zip(
        results(rewritten, qkv(LENGTH)), results(attention, qkv(LENGTH)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert [finding.used for finding in report.findings] == [True, False, True]
    options = attention_options(graphs)
    assert [option.get("is_causal", False) for option in options] == [True, False, True, True]
    assert options[0]["scale"] == 0.3


def test_under_autocast():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return with_mask(causal)(query, key, value)

    check(attention, qkv(LENGTH), 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_from_outside_a_checkpointed_block(dynamic):
    def block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sin()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(query.shape[-2], key.shape[-2])
        narrow = mask & (columns(key.shape[-2]) > rows(query.shape[-2]) - 2)
        for one in (mask, narrow, mask):
            query = torch.utils.checkpoint.checkpoint(
                block, query, key, value, one, use_reentrant=False
            )
        return query

    check(attention, qkv(LENGTH), 2, dynamic, attentions=3)
