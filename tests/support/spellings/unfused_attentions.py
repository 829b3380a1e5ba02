"""Attention as models write it, with queries, keys and values of (B, H, S, D) unless it says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH = 6
HIDDEN = torch.finfo(torch.float32).min


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def causal_float(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask as transformers makes it for eager attention."""
    zero = torch.tensor(0.0, dtype=q.dtype)
    return torch.where(causal(q, k)[None, None], zero, torch.finfo(q.dtype).min)


def llama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = weights + causal_float(q, k)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def bert(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
    weights = F.dropout(F.softmax(weights, dim=-1), p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def gptj(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    weights = weights / math.sqrt(q.shape[-1]) + causal_float(q, k)
    return torch.matmul(F.softmax(weights, dim=-1).to(v.dtype), v)


def falcon(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.transpose(-1, -2)
    weights /= math.sqrt(q.shape[-1])
    weights = F.softmax(weights + causal_float(q, k), dim=-1, dtype=q.dtype)
    return weights @ v


def bloom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    slopes = torch.pow(torch.tensor(0.5), torch.arange(1, 1 + h))
    alibi = (slopes[:, None] * torch.arange(s)).repeat(b, 1).view(b * h, 1, s).to(q.dtype)
    flat = lambda x: x.reshape(b * h, -1, d)
    scores = alibi.baddbmm(batch1=flat(q), batch2=flat(k).transpose(-1, -2), beta=1.0, alpha=0.3)
    weights = scores.view(b, h, s, -1) + causal_float(q, k)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(b * h, s, -1), flat(v)).view(b, h, s, d)


def bart_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute BART's attention of transformers until 4.47: three dimensions, four for the mask."""
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q * d**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2))
    weights = weights.view(b, h, s, s) + torch.zeros(b, 1, s, s, dtype=q.dtype)
    weights = F.softmax(weights.view(b * h, s, s), dim=-1)
    return torch.bmm(weights, v).view(b, h, s, d)


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the code in the documentation of scaled_dot_product_attention."""
    bias = torch.zeros(q.size(-2), k.size(-2), dtype=q.dtype)
    bias = bias.masked_fill(causal(q, k).logical_not(), float("-inf"))
    weights = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)))
    weights += bias
    weights = torch.dropout(torch.softmax(weights, dim=-1), 0.0, train=True)
    return weights @ v


def nanogpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    mask = torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8)
    weights = weights.masked_fill(mask[:, :, : q.shape[2], : q.shape[2]] == 0, float("-inf"))
    return F.softmax(weights, dim=-1) @ v


def where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.mT).div(3.0)
    weights = torch.where(causal(q, k), weights, torch.full([], HIDDEN, dtype=weights.dtype))
    return weights.softmax(-1).type_as(v).matmul(v)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q * 0.3, k)
    weights = weights.masked_fill(~causal(q, k), -1e9).softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def einsum_of_positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of (B, S, H, D), as flash attention takes them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    return torch.einsum("bhqk,bkhd->bqhd", weights.softmax(-1), v)


def einsum_of_any_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("...id,...jd->...ij", q, k).softmax(dim=-1)
    return torch.einsum("...ij,...jd->...id", weights, v)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of one head, (B, S, D)."""
    q, k, v = (x[:, 0] for x in (q, k, v))
    weights = torch.bmm(q, k.permute(0, 2, 1)) / 2.0
    return torch.bmm(F.softmax(weights + causal_float(q, k)[0], -1), v)


def keys_shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with one head of keys and values for all queries."""
    weights = torch.matmul(q, k[:, :1].transpose(-1, -2)).mul(0.3).softmax(dim=-1)
    return torch.matmul(weights, v[:, :1])


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    weights = torch.matmul(q, k.transpose(2, 3)).masked_fill((j > i) | (j <= i - 3), -torch.inf)
    return torch.matmul(weights.softmax(-1), v)


def largest_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.transpose(-1, -2) * 0.3
    weights = weights - weights.amax(-1, keepdim=True).detach()
    return weights.softmax(-1) @ v


SPELLINGS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(llama, bert, gptj, falcon, bloom, bart_before, reference, nanogpt, where),
        *(einsum, einsum_of_positions_first, einsum_of_any_batch),
        *(one_head, keys_shared, window, largest_subtracted),
    )
}
