"""Masks that are almost causal, or that depend on an input, do not change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_graphs import compiled, qkv
from causal_masks import (
    LENGTH,
    OP,
    Mask,
    causal,
    check,
    columns,
    least,
    rows,
    with_mask,
)
from liger_ops.rewrites.attention import causal_attention
from liger_ops.rewrites.attention.mask.proof import visible_keys
from liger_ops.rewrites.engine.maps.algebra import Unknown, affine

NEAR_MISSES: dict[str, Mask] = {
    "shifted later": lambda q, k: columns(k) <= rows(q) + 1,
    "strictly earlier, with key 0": lambda q, k: (columns(k) < rows(q)) | (columns(k) == 0),
    "anticausal": lambda q, k: columns(k) >= rows(q),
    "window": lambda q, k: causal(q, k) & (columns(k) > rows(q) - (LENGTH - 1)),
    "chunks": lambda q, k: causal(q, k) & (columns(k) // 3 == rows(q) // 3),
    "one key hidden": lambda q, k: causal(q, k) & ((columns(k) != 2) | (rows(q) == 2)),
    "one key shown": lambda q, k: causal(q, k) | (columns(k) == 4),
    "every second": lambda q, k: columns(k) <= rows(q) * 2,
    "prefix": lambda q, k: causal(q, k) | (columns(k) < 2),
    "the last first": lambda q, k: columns(k) <= q - 1 - rows(q),
    "a list of positions": lambda q, k: columns(k) <= rows(q) + torch.arange(2)[[0, 1]][1:],
    "one row for all": lambda q, k: (columns(k) <= 3).expand(1, k),
    "tril of the wrong diagonal": lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(1),
    "packed in two": lambda q, k: causal(q, k) & ((columns(k) < 3) == (rows(q) < 3)),
    "written in place": lambda q, k: causal(q, k).fill_(True),
    "a view written in place": lambda q, k: _written(causal(q, k)),
    "a bias of distances": lambda q, k: (
        (columns(k) - rows(q)).float().masked_fill(~causal(q, k), least())
    ),
    "random": lambda q, k: causal(q, k) & (torch.rand(q, k) < 2.0),
    "a bias of one": lambda q, k: torch.where(causal(q, k), 1.0, least()),
    "bytes that wrap": lambda q, k: (
        (torch.arange(k) * 43).to(torch.uint8) <= (torch.arange(q) * 43).to(torch.uint8)[:, None]
    ),
    # PyTorch converts the number to the dtype of the tensor, -1 to 255 and 0.999 to 1.
    "a number that wraps": lambda q, k: causal(q, k) | (torch.zeros(q, k, dtype=torch.uint8) <= -1),
    "a number that is rounded": lambda q, k: (~causal(q, k)).bfloat16() <= 0.999,
    # A dtype without infinity has -448 in its place, and one without 0 a small number.
    "float8": lambda q, k: low(q, k).to(torch.float8_e4m3fn).float(),
    "float8 without 0": lambda q, k: causal(q, k).float().to(torch.float8_e8m0fnu).float().bool(),
}


def low(q: int, k: int) -> Tensor:
    return torch.full((q, k), float("-inf")).triu(1)


def _written(mask: Tensor) -> Tensor:
    mask[:, 2].fill_(True)
    return mask


# The numbers are in the code, because a number of a closure is an input of the graph.
NOT_LOW_ENOUGH: dict[str, Mask] = {
    "-1e3": lambda q, k: torch.zeros(q, k).masked_fill(~causal(q, k), -1e3),
    "-1e4": lambda q, k: torch.where(causal(q, k), 0.0, -1e4),
    "-1e29": lambda q, k: (~causal(q, k)).float() * -1e29,
}


@pytest.mark.parametrize("name", NOT_LOW_ENOUGH)
def test_a_number_that_leaves_something_after_the_softmax_is_left_alone(name):
    (reason,) = check(with_mask(NOT_LOW_ENOUGH[name]), qkv(LENGTH), 0)
    assert "numbers" in reason
    # Such numbers have no rule, and would not be treated as minus infinity if they had one.
    with pytest.raises(Unknown, match="something other than 0 and minus infinity"):
        visible_keys(affine(float(name)))


def test_what_a_number_in_a_mask_says():
    for number, seen in ((0.0, True), (-1e30, False), (least(), False), (-float("inf"), False)):
        assert visible_keys(affine(number)) is seen
    for number in (1.0, 1e30, float("inf"), -1.0):
        with pytest.raises(Unknown):
            visible_keys(affine(number))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_left_alone(name, dynamic):
    (reason,) = check(with_mask(NEAR_MISSES[name]), qkv(LENGTH), 0, dynamic)
    assert reason


def transformers_positions(positions: Tensor) -> Tensor:
    b = torch.arange(2)[:, None, None, None]
    i = torch.arange(LENGTH)[None, None, :, None]
    j = torch.arange(LENGTH)[None, None, None, :]
    return positions[b, j] <= positions[b, i]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("extra", "combine"),
    [
        ((LENGTH, LENGTH), lambda given, mask, q: given > 0),
        ((2, LENGTH), lambda given, mask, q: mask & (given > -9)[:, None, None, :]),
        ((2, LENGTH), lambda given, mask, q: transformers_positions(given.argsort(-1))),
        ((), lambda given, mask, q: columns(q) <= rows(q) + (given > 9).long()),
        ((LENGTH, LENGTH), lambda given, mask, q: torch.where(mask, given, least())),
    ],
    ids=["mask", "padding", "positions", "offset", "bias"],
)
def test_a_mask_of_inputs_is_left_alone(extra, combine, dynamic):
    def attention(query: Tensor, key: Tensor, value: Tensor, given: Tensor) -> Tensor:
        length = query.shape[-2]
        mask = combine(given.detach(), causal(length, length), length)
        # Each query sees a key, whatever the input.
        if mask.dtype == torch.bool:
            mask = mask | (columns(length) == 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    given = torch.randn(extra, generator=torch.Generator().manual_seed(3))
    (reason,) = check(attention, [*qkv(LENGTH), given], 0, dynamic)
    assert "depends on" in reason


def test_an_offset_that_is_an_input_is_left_alone():
    def attention(query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        mask = columns(key.shape[-2]) <= rows(query.shape[-2]) + offset
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    for dynamic, offset, count in ((False, 1, 0), (True, 2, 0), (False, 0, 1)):
        rewritten, report, _ = compiled(attention, [causal_attention.rewrite], dynamic)
        inputs = qkv(LENGTH)
        torch.testing.assert_close(rewritten(*inputs, offset), attention(*inputs, offset))
        assert report.counts().get(OP, 0) == count
