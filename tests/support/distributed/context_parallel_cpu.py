"""Attention on CPUs for PyTorch's `context_parallel`, which only has rings of CUDA kernels.

The context splits the buffers and replaces `scaled_dot_product_attention` as on GPUs. The operator
that CPUs have for it gathers keys and values here, and masks by the positions of the queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _create_default_load_balancer,
)

import ranks
from liger_ops.distributed.vocab_parallel.shard import gathered, scattered_sum

SEQUENCE = 2
aten = torch.ops.aten


def register() -> None:
    """Give `context_parallel` the operators of CPUs."""
    _attention.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    _attention.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = (
        _backward
    )


def positions(length: int) -> Tensor:
    """Return the positions of all ranks' tokens, in the order of the ranks."""
    balancer = _create_default_load_balancer(length, dist.get_world_size(), ranks.DEVICE)
    return torch.arange(length) if balancer is None else balancer._generate_indices()[0].long()


def _mask(length: int, is_causal: bool) -> Tensor:
    own = positions(length).chunk(dist.get_world_size())[dist.get_rank()]
    mask = own[:, None] >= torch.arange(length)
    return mask if is_causal else torch.ones_like(mask)


def _whole(x: Tensor, q: Tensor) -> Tensor:
    """Gather the keys or values of all ranks, ordered by position, for each head of q."""
    whole = gathered(x, SEQUENCE, dist.group.WORLD)
    whole = whole.index_select(SEQUENCE, torch.argsort(positions(whole.shape[SEQUENCE])))
    return whole.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _own_sum(x: Tensor, heads: int) -> Tensor:
    """Sum the gradients of all keys or values over the ranks; return this rank's positions."""
    summed = x.unflatten(1, (heads, -1)).sum(2)
    ordered = summed.index_select(SEQUENCE, positions(x.shape[SEQUENCE]))
    return scattered_sum(ordered, SEQUENCE, dist.group.WORLD)


def _sharded(x: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(x, like.device_mesh, [Shard(SEQUENCE)], run_check=False)


def _forward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, DTensor]:
    arguments = dict(zip(("q", "k", "v", "dropout_p", "is_causal"), args, strict=False))
    if kwargs.get("attn_mask") is not None:
        raise NotImplementedError("context_parallel takes no attn_mask")
    q, k, v = (arguments[name].to_local() for name in ("q", "k", "v"))
    k, v = _whole(k, q), _whole(v, q)
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    scores = scores.masked_fill(
        ~_mask(k.shape[SEQUENCE], arguments.get("is_causal", False)), -torch.inf
    )
    lse = scores.logsumexp(-1)
    y = torch.exp(scores - lse.unsqueeze(-1)) @ v
    return _sharded(y, arguments["q"]), _sharded(lse, arguments["q"])


def _backward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, DTensor, DTensor]:
    like, is_causal = args[1], args[7]
    dy, q, k, v, y, lse = (x.to_local() for x in args[:6])
    heads = k.shape[1]
    k, v = _whole(k, q), _whole(v, q)
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse.unsqueeze(-1))
    p = p.masked_fill(~_mask(k.shape[SEQUENCE], is_causal), 0.0)
    ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * scale
    gradients = ds @ k, _own_sum(ds.mT @ q, heads), _own_sum(p.mT @ dy, heads)
    return tuple(_sharded(x, like) for x in gradients)  # type: ignore[return-value]
