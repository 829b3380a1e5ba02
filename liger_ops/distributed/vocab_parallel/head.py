"""A head of the rank's words: its logits, and from their gradient, a chunk of tokens at a time, the
gradients of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...lowering.common.heads.linear_cross_entropy import product
from ...ops.heads.head import (
    accumulation_dtype,
    factors_of,
    forward_dweight_dtype,
    forward_gradient_dtype,
    linear,
    products_of,
    rounds_once,
)
from ...ops.heads.scaling import scaled
from .collectives import fence, start_sum, wait
from .shard import HEAD


class Head(NamedTuple):
    """A head's tensors, in the order of masks."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_x: Tensor | None
    lora_b: Tensor | None

    def flat(self) -> Head:
        """The head with a row of x, and of lora_x, for each token."""
        tokens = self.rows.shape[:-1].numel()
        rows, lora_x = (
            None if value is None else value.reshape(tokens, value.shape[-1])
            for value in (self.rows, self.lora_x)
        )
        return Head(rows, self.weight, self.bias, lora_x, self.lora_b)

    def split(self, size: int) -> list[Head]:
        """The heads of chunks of this many rows."""
        parts = self.rows.split(size)
        loras = [None] * len(parts) if self.lora_x is None else self.lora_x.split(size)
        return [
            self._replace(rows=rows, lora_x=lora_x)
            for rows, lora_x in zip(parts, loras, strict=True)
        ]

    def logits(self) -> Tensor:
        return linear(products_of(self.rows, self.weight, self.lora_x, self.lora_b), self.bias)


class HeadGradients:
    """The gradients of a head, from those of its logits.

    Those of rows and lora_x are summed over the ranks of the group, if there is one, beside the
    products that follow.
    """

    def __init__(
        self, head: Head, wanted: Sequence[bool], group: str | None, chunk_size: int,
        accum_dtype: torch.dtype | None, in_forward: bool,
    ) -> None:  # fmt: skip
        weight = head.weight
        self.wanted, self.group = wanted, group
        self.dtype = self.dweight_dtype = weight.dtype
        if in_forward:
            self.dtype = forward_gradient_dtype(weight)
            self.dweight_dtype = forward_dweight_dtype(weight, accum_dtype)
        self.sum_dtype = accumulation_dtype(weight, accum_dtype)
        if rounds_once(weight, accum_dtype) and head.rows.shape[0] <= chunk_size:
            self.sum_dtype = weight.dtype
        self.dx: list[Tensor] = []
        self.dlora_x: list[Tensor] = []
        self.dweight: Tensor | None = None
        self.dlora_b: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, chunk: Head, dlogits: Tensor) -> None:
        if self.wanted[0]:
            self.dx.append(self._of_tokens(dlogits, chunk.weight))
        if self.wanted[3]:
            assert chunk.lora_b is not None
            self.dlora_x.append(self._of_tokens(dlogits, chunk.lora_b))
        if self.wanted[1]:
            self.dweight = added(self.dweight, dlogits.t(), chunk.rows, self.sum_dtype)
        if self.wanted[4]:
            assert chunk.lora_x is not None
            self.dlora_b = added(self.dlora_b, dlogits.t(), chunk.lora_x, self.sum_dtype)
        if self.wanted[2]:
            double = dlogits.dtype is torch.float64
            part = dlogits.sum(0, dtype=torch.float64 if double else torch.float32)
            self.dbias = part if self.dbias is None else self.dbias + part

    def _of_tokens(self, dlogits: Tensor, weight: Tensor) -> Tensor:
        part = added(None, dlogits, weight, self.dtype)
        return part if self.group is None else start_sum(part, self.group)

    def results(self) -> list[Tensor | None]:
        dx, dlora_x = (
            torch.cat([wait(part) for part in parts]) if parts else None
            for parts in (self.dx, self.dlora_x)
        )
        dweight, dlora_b = (
            rounded(total, self.dweight_dtype) for total in (self.dweight, self.dlora_b)
        )
        return [dx, dweight, rounded(self.dbias, self.dtype), dlora_x, dlora_b]


def added(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, or a @ b, in dtype, which may be wider than that of a and b. `total` is used
    up."""
    if torch.compiler.is_compiling():
        part = _traced(a, b, dtype)
        return part if total is None else fence(total) + part
    add = total is not None
    if total is None:
        total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    product(total, a, b, add)
    return total


def _traced(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `product` computes it, without a write in place: Dynamo cannot save a tensor of an
    autograd function's forward that aliases another, as one that was written to does, or the
    result of `to` the same dtype."""
    if a.dtype is dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    if a.dtype is torch.bfloat16:
        return torch.mm(a, b).to(dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def rounded(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """total in dtype, for autograd to save: see `_traced`."""
    return total if total is None or total.dtype is dtype else total.to(dtype)


def head_of(call: Any, prefix: str = "") -> Head:
    """The head of a call, the names of whose arguments have this prefix."""
    return Head(*(getattr(call, f"{prefix}{name}") for name in HEAD))


def finished(call: Any, head: Head, divisor: Tensor | int) -> list[Tensor | None]:
    """The gradients of a head that are wanted, from those that the forward computed: times dloss
    and the reduction's factor."""
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    if call.dloss is None or all(gradient is None for gradient in computed):
        return [None] * len(computed)
    factors = factors_of(call.dloss, call.target, call.ignore_index, divisor)
    return [
        None if gradient is None or not wanted else scaled(gradient, factor, head.rows.dtype)
        for wanted, gradient, factor in zip(call.output_mask, computed, factors, strict=True)
    ]
