"""Collectives of the sharded losses: PyTorch's functional ones, which torch.compile traces, and
autograd functions for tensors that every rank uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...torch_private import functional_collectives as functional

# torch 2.11 has only the second name of each pair; later versions warn about it.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def gathered(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """All-gather the ranks' tensors, of one shape, and concatenate them along a dimension."""
    return wait(start_gather(tensor, dim, group))


def start_gather(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """Start an all-gather, for whose result `wait` waits."""
    return _gather(tensor.contiguous(), dim, group)


def view_by_rank(gathered: Tensor, count: int) -> Tensor:
    """View the result of an all-gather along the first dimension as (ranks, count, ...), where
    `count` is the size of that dimension on one rank."""
    # Within torch.set_default_device, Dynamo does not trace Tensor.unflatten.
    return gathered.view(gathered.shape[0] // count, count, *gathered.shape[1:])


def summed(tensor: Tensor, group: Any) -> Tensor:
    return reduced(tensor, "sum", group)


def reduced(tensor: Tensor, operation: str, group: Any) -> Tensor:
    """All-reduce a tensor over a group or a mesh's dimension; `operation` is "sum" or "max"."""
    return wait(functional.all_reduce(tensor.contiguous(), operation, group))


def start_sum(tensor: Tensor, group: Any) -> Tensor:
    """Start an all-reduce of a sum, for whose result `wait` waits."""
    return functional.all_reduce(tensor.contiguous(), "sum", group)


def scattered_sum(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """Reduce-scatter: sum over the ranks, and return the rank's part along a dimension."""
    return wait(_scatter(tensor.contiguous(), "sum", dim, group))


def wait(tensor: Tensor) -> Tensor:
    """Make the stream wait for a collective; the host does not wait."""
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def fence(tensor: Tensor) -> Tensor:
    """Return the tensor, and have Inductor write it to memory before it is used. Otherwise Inductor
    adds up the products of all chunks in one kernel, and keeps every product until then."""
    return functional.wait_tensor(tensor)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward to raise if it is itself to be differentiated. PyTorch's
    `once_differentiable` raises only if an incoming gradient requires a gradient; for a constant
    one, the second derivative would be wrong without an error."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        # Compiled code has no second derivative either, and raises itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "liger_ops.distributed: the gradient over a sharded vocabulary cannot be"
                " differentiated again; got create_graph=True"
            )
        return backward(ctx, *grads)

    return run


class Replicated(Function):
    """Identity of a tensor that every rank has; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Gathered(Function):
    """All-gather of a tensor of which each rank has an equal part along a dimension; its gradient
    is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scattered_sum(grad, ctx.dim, ctx.group), None, None
