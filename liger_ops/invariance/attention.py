"""PyTorch's scaled_dot_product_attention with the same bits for a row in every batch: the operators
behind it become `varlen_attention`, with a document for each row of the batch.

If there are not as many queries as keys, each row is completed: with queries before its own, or
with keys behind its own, which `lengths` hides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..invariant_mode import NotInvariantError
from .rows import names_of

FORWARDS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
BACKWARDS = tuple(f"{name}_backward" for name in FORWARDS)
REFUSED = "_scaled_dot_product_attention_math"


def forward(overload: Any, base: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compute by varlen_attention, a document for each row of the batch.

    logsumexp is (B, H, L). The other results, of random numbers, are empty.
    """
    given = _named(overload, args, options)
    query = given["query"]
    try:
        y, lse = torch.ops.liger.varlen_attention_forward(*_operands(given), *_documents(given))
    except ValueError as error:
        # Its scales and sizes of heads are fewer than PyTorch's.
        raise NotInvariantError(
            f"liger_ops.invariant: scaled_dot_product_attention is computed by {error}"
        ) from error
    result = _unpacked(y, query)
    if "efficient" not in overload.name() and result.shape == query.shape:
        # PyTorch's other kernels return the strides of query, and callers view the result by them.
        of_query = torch.empty_like(query)
        result = result if result.stride() == of_query.stride() else of_query.copy_(result)
    results: list[Any] = [result, _of_rows(lse, query).contiguous()]
    for other in overload._schema.returns[2:]:
        is_tensor = str(other.type) == "Tensor"
        results.append(query.new_empty(0, dtype=torch.int64) if is_tensor else query.shape[2])
    return tuple(results)


def backward(overload: Any, base: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compute the gradients of query, key and value, by varlen_attention."""
    given = _named(overload, args, options)
    dy, query, key, value, y, lse = args[:1] + tuple(
        given[name] for name in ("query", "key", "value", "out", "logsumexp")
    )
    cu_seqlens, longest, lengths, *others = _documents(given)
    window = others[2:4]
    key_mask = sinks = bounds = softcap = None
    lse_of_queries = F.pad(lse, (longest - lse.shape[2], 0))
    gradients = torch.ops.liger.varlen_attention_backward(
        _packed(dy, longest), *_operands(given), _packed(y, longest),
        lse_of_queries.transpose(0, 1).flatten(1),
        cu_seqlens, longest, lengths, key_mask, sinks, bounds, *window,
        given.get("scale"), softcap, "triton", [True, True, True, False],
    )  # fmt: skip
    shaped = (
        _unpacked(gradient, x, of_keys=x is not query)
        for gradient, x in zip(gradients[:3], (query, key, value), strict=True)
    )
    nothing = (None,) * (len(overload._schema.returns) - 3)
    return (*shaped, *nothing)


def refuse(overload: Any, base: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Refuse attention for which PyTorch has no fused kernel."""
    raise NotInvariantError(
        "liger_ops.invariant: scaled_dot_product_attention is covered without a mask or dropout,"
        " and with is_causal for as many queries as keys, where PyTorch has a fused kernel;"
        " liger_ops.fuse(model) and torch.compile cover the masks of transformers' models"
    )


def _named(overload: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, after a check that they are covered."""
    names = names_of(overload)
    given = dict(zip(names, args, strict=False)) | options
    masks = [given.get(name) for name in ("attn_bias", "attn_mask")]
    has_mask = any(mask is not None and mask.numel() for mask in masks)
    query, key = given["query"], given["key"]
    is_cut = given.get("is_causal") and query.shape[2] != key.shape[2]
    if has_mask or given.get("dropout_p") or is_cut:
        refuse(overload, query)
    return given


def _documents(given: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of varlen_attention_forward behind value."""
    query, keys = given["query"], given["key"].shape[2]
    batch, length = query.shape[0], _length(given)
    numbers = {"device": query.device, "dtype": torch.int32}
    cu_seqlens = torch.arange(batch + 1, **numbers) * length
    lengths = None if keys == length else torch.full((batch,), keys, **numbers)
    right, scale = 0 if given.get("is_causal") else -1, given.get("scale")
    return (cu_seqlens, length, lengths, None, None, -1, right, scale, None, "triton")


def _length(given: dict[str, Any]) -> int:
    return max(given["query"].shape[2], given["key"].shape[2])


def _operands(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    length = _length(given)
    return (
        _packed(query, length),
        _packed(key, length, of_keys=True),
        _packed(value, length, of_keys=True),
    )


def _packed(x: Tensor, length: int, *, of_keys: bool = False) -> Tensor:
    more = length - x.shape[2]
    completed = F.pad(x, (0, 0, 0, more) if of_keys else (0, 0, more, 0)) if more else x
    return completed.transpose(1, 2).flatten(0, 1)


def _unpacked(x: Tensor, like: Tensor, *, of_keys: bool = False) -> Tensor:
    own = like.shape[2]
    rows = x.unflatten(0, (like.shape[0], -1))
    rows = rows[:, :own] if of_keys else rows[:, rows.shape[1] - own :]
    return rows.contiguous().transpose(1, 2)


def _of_rows(lse: Tensor, query: Tensor) -> Tensor:
    rows = lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1)
    return rows[:, :, rows.shape[2] - query.shape[2] :]
