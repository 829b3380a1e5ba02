"""The collectives between the parts of a sharded loss: PyTorch's functional ones, which
torch.compile traces, and the gradients of a tensor that every rank uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...torch_private import functional_collectives as functional

# torch 2.11 has these names alone, and later versions warn of them.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def gathered(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' tensors, of one shape, concatenated along a dimension."""
    return wait(start_gather(tensor, dim, group))


def start_gather(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' tensors, for which `wait` waits."""
    return _gather(tensor.contiguous(), dim, group)


def of_each_rank(gathered: Tensor, count: int) -> Tensor:
    """(ranks, count, ...), of what was gathered along the first dimension, `count` of each rank."""
    # Within torch.set_default_device, Dynamo does not trace Tensor.unflatten.
    return gathered.view(gathered.shape[0] // count, count, *gathered.shape[1:])


def summed(tensor: Tensor, group: Any) -> Tensor:
    return reduced(tensor, "sum", group)


def reduced(tensor: Tensor, operation: str, group: Any) -> Tensor:
    """The sum, "sum", or the maximum, "max", over the ranks of a group or a mesh's dimension."""
    return wait(functional.all_reduce(tensor.contiguous(), operation, group))


def start_sum(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks, for which `wait` waits."""
    return functional.all_reduce(tensor.contiguous(), "sum", group)


def scattered_sum(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """The rank's part, along a dimension, of the sum over the ranks."""
    return wait(_scatter(tensor.contiguous(), "sum", dim, group))


def wait(tensor: Tensor) -> Tensor:
    """Wait for a collective: the stream does, the host does not."""
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def fence(tensor: Tensor) -> Tensor:
    """The tensor, in memory before anything of it is computed: Inductor would add up the products
    of all chunks in one kernel, and hold every one until then."""
    return functional.wait_tensor(tensor)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise if a backward is itself to be differentiated. PyTorch's `once_differentiable` raises
    only where the incoming gradients require a gradient, and is silent of one that is constant."""

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
    """A tensor that every rank has: each rank's gradient is a part of the whole one, which is their
    sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Gathered(Function):
    """A tensor of which each rank has an equal part along a dimension: the gradient of a part is
    that part of the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scattered_sum(grad, ctx.dim, ctx.group), None, None
