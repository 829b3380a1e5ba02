"""Calls of ops with DTensors whose columns are sharded, compared with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import liger_ops


def forward(op: str, tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    results = getattr(liger_ops, op)(*tensors, **options)
    return results if isinstance(results, tuple) else (results,)


def backward(results: tuple[Tensor, ...], tensors: list[Tensor]) -> list[Tensor]:
    weights = [y.detach().cos() + i for i, y in enumerate(results)]
    return list(torch.autograd.grad(results, tensors, weights))


def outcome(op: str, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    results = forward(op, tensors, options)
    return [*results, *backward(results, tensors)]


def over_columns(tensors: list[Tensor], mesh: Any, placements: Any = None) -> list[Tensor]:
    """Shard the tensors that have as many columns as the first; replicate the others."""
    N = tensors[0].shape[-1]
    sharded = []
    for tensor in tensors:
        last = Shard(tensor.dim() - 1) if tensor.shape[-1] == N else Replicate()
        placed = [last] * mesh.ndim
        if placements is not None:
            placed = placements(tensor)
        sharded.append(distribute_tensor(tensor, mesh, placed).requires_grad_())
    return sharded


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def compare(
    found: list[Any], expected: list[Tensor], tolerance: float = 1e-5, strides: bool = True
) -> None:
    for value, truth in zip(found, expected, strict=True):
        assert isinstance(value, DTensor) and value.dtype is truth.dtype
        assert value.stride() == truth.stride() or not strides
        torch.testing.assert_close(
            value.full_tensor(), truth, rtol=tolerance, atol=tolerance, equal_nan=True
        )
