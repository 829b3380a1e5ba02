"""The products of a head of the rank's words: its logits, and from their gradient, a chunk of
tokens at a time, the gradients of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...lowering.common.products import product
from ...ops.heads import head as heads
from ...ops.heads.gradients import accumulation_dtype, gradient_dtypes, rounds_once
from ...ops.heads.scaling import scaled
from .collectives import fence, start_sum, wait


class Head(NamedTuple):
    """A head's tensors, in the order of masks; rows, and lora_x, have one row per token."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_x: Tensor | None
    lora_b: Tensor | None

    def split(self, size: int) -> list[Head]:
        parts = self.rows.split(size)
        loras = [None] * len(parts) if self.lora_x is None else self.lora_x.split(size)
        return [
            self._replace(rows=rows, lora_x=lora_x)
            for rows, lora_x in zip(parts, loras, strict=True)
        ]

    def logits(self) -> Tensor:
        return heads.Head(*self).logits()


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
        dtypes = gradient_dtypes(weight, [True] * 5, accum_dtype, in_forward)
        self.dtype, self.dweight_dtype = dtypes[0] or weight.dtype, dtypes[1] or weight.dtype
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
    return product(a, b, dtype, total, total is not None)


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


def each_scaled(
    computed: Sequence[Tensor | None], factors: Sequence[Tensor], head: Head
) -> list[Tensor | None]:
    """The gradients of a head that a forward computed, times the backward's factors."""
    return [
        None if gradient is None or tensor is None else scaled(gradient, factor, tensor.dtype)
        for gradient, factor, tensor in zip(computed, factors, head, strict=True)
    ]
