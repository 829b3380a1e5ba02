"""Which masks become is_causal: every spelling of a causal one, at every size."""

from __future__ import annotations

import pytest
import torch

from attention_graphs import checked, qkv
from causal_masks import (
    LENGTH,
    OP,
    Mask,
    causal,
    check,
    columns,
    float_mask,
    least,
    rows,
    transformers_packed,
    with_mask,
)
from liger_ops.rewrites.attention import causal_attention

CAUSAL: dict[str, Mask] = {
    "arange": causal,
    "arange, reversed": lambda q, k: torch.ge(torch.arange(q).unsqueeze(-1), torch.arange(k)),
    "not later": lambda q, k: ~(columns(k) > rows(q)),
    "difference": lambda q, k: (rows(q) - columns(k)) >= 0,
    "as methods": lambda q, k: (rows(q) - columns(k)).__abs__().__eq__(rows(q) - columns(k)),
    "strict": lambda q, k: columns(k).lt(rows(q) + 1),
    "before or at": lambda q, k: (columns(k) < rows(q)) | columns(k).eq(rows(q)),
    "tril": lambda q, k: torch.tril(torch.ones(q, k, dtype=torch.bool)),
    "tril of floats": lambda q, k: torch.ones(q, k).tril().view(1, 1, q, k).bool(),
    "triu": lambda q, k: torch.triu(torch.ones(q, k), diagonal=1) == 0,
    "transposed": lambda q, k: torch.ones(k, q, dtype=torch.bool).triu().T,
    "transposed as a matrix": lambda q, k: torch.ones(k, q).triu().mT == 1,
    "adjoint": lambda q, k: torch.ones(k, q).triu().mH == 1,
    "slice of a longer": lambda q, k: torch.ones(64, 64, dtype=torch.bool).tril()[:q, :k],
    "both shifted": lambda q, k: (torch.arange(k) + 3)[None] <= (torch.arange(q) + 3)[:, None],
    "arange with a start": lambda q, k: torch.arange(2, k + 2) <= torch.arange(2, q + 2)[:, None],
    "where": lambda q, k: torch.where(causal(q, k), True, False),
    "expanded": lambda q, k: causal(q, k)[None, None].expand(2, 4, q, k),
    "no padding": lambda q, k: causal(q, k) & torch.ones(2, k).bool()[:, None, None, :],
    "transformers": transformers_packed,
    "minus infinity": lambda q, k: torch.full((q, k), float("-inf")).triu(1),
    "truth of minus infinity": lambda q, k: ~torch.full((q, k), float("-inf")).triu(1).bool(),
    "least number": lambda q, k: torch.where(causal(q, k), torch.zeros(()), least()),
    "masked_fill": float_mask(causal, float("-inf")),
    "product": lambda q, k: (1.0 - causal(q, k).float()) * least(),
    "half precision": lambda q, k: torch.full((q, k), least()).triu(1).half().float(),
    "float8 with infinity": lambda q, k: (
        torch.full((q, k), least()).triu(1).to(torch.float8_e5m2).float()
    ),
    "bytes": lambda q, k: causal(q, k).to(torch.uint8) > 0,
    "a rounded comparison": lambda q, k: causal(q, k) & (torch.full((q, k), 2**24 + 1) <= 2.0**24),
    "int32": lambda q, k: (
        torch.arange(k, dtype=torch.int32) <= torch.arange(q, dtype=torch.int32)[:, None]
    ),
}
# Causal at the traced sizes, but not at every size.
CAUSAL_AT_THIS_SIZE: dict[str, Mask] = {
    "wide window": lambda q, k: causal(q, k) & (columns(k) > rows(q) - LENGTH),
    "one chunk": lambda q, k: causal(q, k) & (columns(k) // LENGTH == rows(q) // LENGTH),
    "one window": lambda q, k: torch.ones(q, k).tril().triu(1 - LENGTH) == 1,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_found(name, dynamic):
    check(with_mask(CAUSAL[name]), qkv(LENGTH), 1, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL_AT_THIS_SIZE)
def test_a_window_as_long_as_the_sequence_is_none_where_the_size_is_fixed(name, dynamic):
    check(with_mask(CAUSAL_AT_THIS_SIZE[name]), qkv(LENGTH), 0 if dynamic else 1, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 9), (9, 6), (2, 5)])
def test_is_causal_counts_queries_and_keys_from_0(queries, keys, dynamic):
    inputs = qkv(queries, keys)
    check(with_mask(causal), inputs, 1, dynamic)
    check(with_mask(CAUSAL["tril"]), inputs, 1, dynamic)
    check(with_mask(lambda q, k: columns(k) <= rows(q) + 2), inputs, 0, dynamic)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1)])
def test_one_query_or_one_key(queries, keys):
    check(with_mask(causal), qkv(queries, keys), 1)


SHOWS_ALL: dict[str, Mask] = {
    "ones": lambda q, k: torch.ones(q, k, dtype=torch.bool),
    "zeros that are added": lambda q, k: torch.zeros(q, k),
    "the last queries of a cache": lambda q, k: columns(k) <= rows(q) + 4,
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in SHOWS_ALL), ("ones", True)],
)
def test_a_mask_that_hides_nothing_is_dropped(name, dynamic):
    for queries, keys in ((1, 5), (3, 5)):
        rewrite, inputs = causal_attention.rewrite, qkv(queries, keys)
        report, options = checked(with_mask(SHOWS_ALL[name]), rewrite, inputs, dynamic, True)
        assert report.counts() == {OP: 1}
        assert options == [{}]
