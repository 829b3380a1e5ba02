"""A rank's words of a sharded vocabulary, and the collectives of the sharded losses: PyTorch's
functional ones, which torch.compile traces, and autograd functions for tensors that every rank
uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops.heads.head import HEAD
from ...record import Op
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


# The target of a token that does not count, for the ops of a rank's words. The user's ignore_index
# may be the index of a word, counted from the rank's first.
IGNORED = -100
# The tensors of a head that every rank has.
SHARED = ("x", "lora_x")

# A sum of class weights for each rank.
ClassSums = Tensor | tuple[int, ...]


class VocabShard(NamedTuple):
    """The words `first` to `first + held - 1` of V, on the rank `rank` of the group named `group`.
    No rank of it has more than `most` words. With `sums_x`, the gradients of the tensors that
    every rank has (SHARED) are summed over the ranks; otherwise each rank returns its term of the
    sum."""

    group: str
    rank: int
    ranks: int
    first: int
    held: int
    V: int
    most: int
    sums_x: bool = False

    @staticmethod
    def of_rank(group: str, rank: int, ranks: int, V: int) -> VocabShard:
        """Return a rank's words of V, as `torch.chunk` splits them."""
        most = -(-V // ranks)
        first = min(rank * most, V)
        return VocabShard(group, rank, ranks, first, min(first + most, V) - first, V, most)

    def is_local(self, target: Tensor) -> Tensor:
        """Return whether each target is one of the rank's words."""
        return (target >= self.first) & (target < self.first + self.held)

    def local_index(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return targets counted from the rank's first word. The target of another rank becomes
        some word of this rank, and not IGNORED, because the ops leave ignored tokens out."""
        word = (target - self.first).clamp(0, max(self.held - 1, 0))
        return torch.where(target == ignore_index, IGNORED, word)

    def valid(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return whether each target is a word of the vocabulary or ignore_index."""
        return (target == ignore_index) | ((target >= 0) & (target < self.V))

    def local_words(self, whole: Tensor | None) -> Tensor | None:
        """Return the rank's elements of a tensor with an element for each word."""
        return None if whole is None else whole[self.first : self.first + self.held]

    def class_sums(self, class_weight: Tensor | None, dtype: torch.dtype) -> ClassSums:
        """Return the sum of the weights of each rank's words; without weights, their number."""
        if class_weight is None:
            firsts = (min(rank * self.most, self.V) for rank in range(self.ranks))
            return tuple(min(self.V - first, self.most) for first in firsts)
        missing = self.ranks * self.most - self.V
        padded = torch.nn.functional.pad(class_weight.to(dtype), (0, missing))
        return padded.view(self.ranks, self.most).sum(-1)

    def no_statistics(self, call: Any, target: Tensor, count: int) -> Tensor:
        """Return the statistics of a rank without words: lse, which is -inf, and zeros."""
        x = call.x if hasattr(call, "x") else call.logits
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        zeros = x.new_zeros((count, *target.shape), dtype=dtype)
        return torch.cat([torch.full_like(zeros[:1], float("-inf")), zeros[1:]])

    def gradients(self, op: Op, call: Any) -> tuple[Tensor | None, ...]:
        """Return the results of a backward op's call for the rank's words. A rank without words
        does not call the op, but takes part in the collectives."""
        if not hasattr(call, "x"):
            return (op.overload(*call) if self.held else torch.zeros_like(call.logits),)
        if self.held:
            results = list(op.overload(*call))
        else:
            pairs = zip(HEAD, call.output_mask, strict=True)
            results = [
                torch.zeros_like(getattr(call, n)) if wanted else None for n, wanted in pairs
            ]
        if self.sums_x:
            shared = [i for i in map(HEAD.index, SHARED) if results[i] is not None]
            sums = [start_sum(results[i], self.group) for i in shared]
            for i, total in zip(shared, sums, strict=True):
                results[i] = wait(total)
        return tuple(results)
