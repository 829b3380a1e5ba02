"""Attention that is written out, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from rewriting import Rewriter, check, each_dtype, values
from unfused_attentions import LENGTH, SPELLINGS, causal_float, llama

ATTENTION = ["attention"]


def qkv(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(2, 4, length, 8, dtype=dtype, seed=seed) for seed in range(3)]


def calls(found: Rewriter) -> list[dict[str, Any]]:
    """The keyword arguments of each call, and whether the graph has a softmax besides."""
    assert not any("softmax" in str(node.target) for node in found.nodes())
    return [n.kwargs for n in found.nodes() if n.target is F.scaled_dot_product_attention]


@each_dtype
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 some round scores and softmax to it, and the call is nearer to the truth."""
    found = check(SPELLINGS[name], *qkv(dtype=dtype), counts={"attention": 1}, names=ATTENTION)
    assert len(calls(found)) == 1


@pytest.mark.quick(rewrites=("attention", "causal_attention"))
@pytest.mark.parametrize("name", ["llama", "reference", "nanogpt", "where", "einsum"])
def test_a_causal_mask_is_found_afterwards(name: str) -> None:
    counts = {"attention": 1, "causal_attention": 1}
    (options,) = calls(check(SPELLINGS[name], *qkv(), counts=counts))
    assert options["is_causal"] is True and "attn_mask" not in options


def test_repeated_heads_are_found_afterwards() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = lambda x: x[:, :, None].expand(2, 2, 2, LENGTH, 8).reshape(2, 4, LENGTH, 8)
        return llama(q, copies(k), copies(v))

    q, k, v = (values(2, heads, LENGTH, 8, seed=heads) for heads in (4, 2, 2))
    counts = {"attention": 1, "causal_attention": 1, "grouped_attention": 1}
    (options,) = calls(check(attention, q, k, v, counts=counts))
    assert options == {"scale": 0.25, "is_causal": True, "enable_gqa": True}


@pytest.mark.parametrize("name", ["llama", "falcon", "where", "one_head"])
def test_of_any_length(name: str) -> None:
    counts = {"attention": 1}
    check(SPELLINGS[name], *qkv(), then=qkv(9), counts=counts, names=ATTENTION, dynamic=True)


def test_queries_shorter_than_keys() -> None:
    """As with a cache: query i sees the keys up to i + 3."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        mask = torch.where(torch.arange(k.shape[2])[None] <= i, 0.0, -torch.inf)
        return (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v

    q, k, v = qkv(LENGTH + 3)
    q = q[:, :, :LENGTH].detach().requires_grad_()
    check(attention, q, k, v, counts={"attention": 1})


@pytest.mark.parametrize("heads", [1, 4])
def test_learned_biases(heads: int) -> None:
    """As T5's: the bias gets its gradient, and may be the same for all heads."""

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        places = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None] + LENGTH
        bias = F.embedding(places, table).permute(2, 0, 1).unsqueeze(0)
        weights = torch.matmul(q, k.transpose(3, 2)) + bias + causal_float(q, k)
        return torch.matmul(F.softmax(weights.float(), dim=-1).type_as(weights), v)

    table = values(2 * LENGTH, heads, seed=3)
    (options,) = calls(check(attention, *qkv(), table, counts={"attention": 1}))
    assert options["attn_mask"] is not None and "is_causal" not in options


@pytest.mark.parametrize("shape", [(4, 1, 1), (2, 1, LENGTH, LENGTH), (LENGTH, 1), (1, LENGTH)])
def test_biases_of_every_shape(shape: tuple[int, ...]) -> None:
    attention = lambda q, k, v, bias: (q @ k.transpose(2, 3) + bias).softmax(-1) @ v
    check(attention, *qkv(), values(*shape), counts={"attention": 1})


@each_dtype
def test_autocast(dtype: torch.dtype) -> None:
    """float32 tensors are multiplied in the dtype of autocast, as by the code."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return llama(q, k, v)

    torch._dynamo.reset()
    found = Rewriter(ATTENTION)
    inputs = qkv(dtype=dtype)
    after = torch.compile(attention, backend=found, fullgraph=True)(*inputs)
    before = attention(*inputs)
    assert found.counts() == {"attention": 1}
    assert after.dtype is before.dtype is torch.bfloat16
    torch.testing.assert_close(after, before, rtol=2**-6, atol=2**-6)


def test_weights_that_nothing_uses() -> None:
    """As transformers' layers return them."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        result, _ = weights @ v, weights.sum()
        return result

    check(attention, *qkv(), counts={"attention": 1})


def test_two_attentions_of_one_mask() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_float(q, k)
        once = (q @ k.transpose(2, 3) + mask).softmax(-1) @ v
        return (once @ k.transpose(2, 3) + mask).softmax(-1) @ v

    check(attention, *qkv(), counts={"attention": 2, "causal_attention": 2})


def test_checkpointed_blocks() -> None:
    """The block's mask is computed outside of it."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_float(q, k)

        def block(q: Tensor, mask: Tensor) -> Tensor:
            return (q @ k.transpose(2, 3) + mask).softmax(-1) @ v

        return torch.utils.checkpoint.checkpoint(block, q, mask, use_reentrant=False)

    torch._dynamo.reset()
    found = Rewriter()

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        found(module, inputs)
        return aot_eager(module, inputs)

    inputs = qkv()
    torch.testing.assert_close(
        torch.compile(attention, backend=backend, fullgraph=True)(*inputs), attention(*inputs)
    )
    assert found.counts() == {"attention": 1, "causal_attention": 1}
