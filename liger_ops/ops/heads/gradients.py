"""The gradients of a head's tensors from those of its logits, a chunk of tokens or words at a time.

They serve the definitions, the host code of the kernels, and losses over a sharded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_private import len_torch_dispatch_stack
from .head import HEAD, Head, shaped

# multiply(a, b, dtype, out, add) returns a @ b, or out + a @ b, in dtype. It may write to out.
Multiply = Callable[[Tensor, Tensor, torch.dtype, "Tensor | None", bool], Tensor]

# The positions of a head's tensors in masks and gradients.
X, WEIGHT, BIAS, LORA_X, LORA_B = range(len(HEAD))
OF_TOKENS = (X, LORA_X)


def accumulation_dtype(weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which gradients are summed over chunks."""
    if accum_dtype is not None:
        return accum_dtype
    return torch.float64 if weight.dtype is torch.float64 else torch.float32


def rounds_once(weight: Tensor, accum_dtype: torch.dtype | None) -> bool:
    """Return whether the gradient from a single chunk is one product in weight's dtype.

    It needs no wider sum then. This holds for bfloat16 alone: a product in float16 may overflow
    where the sum in float32 does not.
    """
    return accum_dtype is None and weight.dtype is torch.bfloat16


def gradient_dtypes(
    weight: Tensor, wanted: Sequence[bool], accum_dtype: torch.dtype | None, in_forward: bool
) -> list[torch.dtype | None]:
    """Return the dtype of each gradient that is wanted, and None for the others.

    Gradients of a float16 head that the forward computes, and the backward scales, are wider, so
    that loss scaling cannot make them overflow or vanish.
    """
    dtype = of_weight = weight.dtype
    if in_forward and dtype is torch.float16:
        dtype, of_weight = torch.float32, accumulation_dtype(weight, accum_dtype)
    dtypes = (dtype, of_weight, dtype, dtype, of_weight)
    return [dtype if want else None for dtype, want in zip(dtypes, wanted, strict=True)]


def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None, add: bool) -> Tensor:
    """Return a @ b in dtype, added to `out` if `add`: the `Multiply` of the definitions.

    Autograd may differentiate it. While a graph is traced, it does not write to `out`.
    """
    part = torch.mm(a.to(dtype), b.to(dtype))
    if not add or out is None:
        return part
    return out + part if len_torch_dispatch_stack() else out.add_(part)


def gradients_of_definition(
    weight: Tensor, wanted: Sequence[bool], accum_dtype: torch.dtype | None,
    in_forward: bool = False, by_words: bool = False,
) -> HeadGradients:  # fmt: skip
    """Create the gradients of a head with this weight, for a definition."""
    dtypes = gradient_dtypes(weight, wanted, accum_dtype, in_forward)
    return HeadGradients(dtypes, accumulation_dtype(weight, accum_dtype), by_words)


class HeadGradients:
    """The gradients of a head's tensors, accumulated over chunks of its logits.

    A chunk of tokens gives complete rows of dx and dlora_x, and a summand of dweight, dbias and
    dlora_b. A chunk of words gives complete rows of dweight, dbias and dlora_b, and a summand of dx
    and dlora_x.

    Rows are computed in the gradient's dtype, and sums in `sum_dtype`. `outputs` is memory for the
    gradients: rows are written to it, and a sum is accumulated in it if it has the sum's dtype.
    `share` is called with the rows of dx and dlora_x of each chunk of tokens, before the chunk's
    other products. It may start to sum them over devices.
    """

    def __init__(
        self, dtypes: Sequence[torch.dtype | None], sum_dtype: torch.dtype, by_words: bool = False,
        outputs: Sequence[Tensor | None] = (None,) * 5, multiply: Multiply = product,
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.dtypes, self.sum_dtype, self.by_words = dtypes, sum_dtype, by_words
        self.multiply, self.share = multiply, share
        self.rows: list[list[Tensor]] = [[] for _ in dtypes]
        self.sums: list[Tensor | None] = [None for _ in dtypes]
        self.outputs: list[Tensor | None] = [None for _ in dtypes]
        for i, output in enumerate(outputs):
            if output is None:
                continue
            # The outputs have the shapes of the op's arguments.
            rows = output if i == BIAS else output.view(-1, output.shape[-1])
            if not self._is_sum(i):
                self.outputs[i] = rows
            elif i != BIAS:
                # The op's output is allocated after the last chunk, when the logits are freed.
                same = rows.dtype is sum_dtype
                self.sums[i] = rows if same else torch.empty_like(rows, dtype=sum_dtype)
        self.filled = 0

    def _is_sum(self, i: int) -> bool:
        """Return whether gradient i is a sum over the chunks, and not made of rows of each."""
        return (i in OF_TOKENS) == self.by_words

    def add(self, chunk: Head, dlogits: Tensor) -> None:
        """Add a chunk's gradients, from its part of the head and the gradient of its logits."""
        rows, weight, _, lora_x, lora_b = chunk
        self._add_product(X, dlogits, weight)
        self._add_product(LORA_X, dlogits, lora_b)
        self._add_product(WEIGHT, dlogits.t(), rows)
        self._add_product(LORA_B, dlogits.t(), lora_x)
        if self.dtypes[BIAS] is not None:
            double = dlogits.dtype is torch.float64
            part = dlogits.sum(0, dtype=torch.float64 if double else torch.float32)
            total, rows_of_bias = self.sums[BIAS], self._output_rows(BIAS, part.shape[0])
            if self._is_sum(BIAS):
                self.sums[BIAS] = part if total is None else total + part
            elif rows_of_bias is not None:
                rows_of_bias.copy_(part)
            else:
                self.rows[BIAS].append(part)
        self.filled += dlogits.shape[1 if self.by_words else 0]

    def _add_product(self, i: int, a: Tensor, b: Tensor | None) -> None:
        dtype = self.dtypes[i]
        if dtype is None or b is None:
            return
        if self._is_sum(i):
            add = self.filled > 0
            self.sums[i] = self.multiply(a, b, self.sum_dtype, self.sums[i], add)
            return
        output = self._output_rows(i, a.shape[0])
        rows = self.multiply(a, b, dtype, output, False)
        if output is None:
            self.rows[i].append(rows if self.share is None else self.share(rows))

    def _output_rows(self, i: int, count: int) -> Tensor | None:
        """Return the memory for the chunk's `count` rows of gradient i, or None."""
        output = self.outputs[i]
        return None if output is None else output[self.filled : self.filled + count]

    def results(self) -> list[Tensor | None]:
        """Return the gradients, with one row per token or word."""
        return [self._result(i, dtype) for i, dtype in enumerate(self.dtypes)]

    def _result(self, i: int, dtype: torch.dtype | None) -> Tensor | None:
        if dtype is None or not self._is_sum(i):
            gradient = torch.cat(self.rows[i]) if self.rows[i] else self.outputs[i]
        else:
            # The list's reference is dropped, so that the sum is freed once it has been cast.
            gradient, self.sums[i] = self.sums[i], None
        if gradient is None or dtype is None or gradient.dtype is dtype:
            return gradient
        return gradient.to(dtype)


def gradients_by_words(
    call: Any, dlogits_of: Callable[[Tensor, slice], Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients that a backward's call asks for, a chunk of words at a time.

    `dlogits_of(logits, words)` returns the gradient of all tokens' logits of some words, in the
    dtype of the logits.
    """
    options = (call.output_mask, call.accum_dtype)
    gradients = gradients_of_definition(call.weight, *options, by_words=True)
    for words, chunk_head, logits in Head.of_call(call).chunks_of_words(call.chunk_bytes):
        gradients.add(chunk_head, dlogits_of(logits, words))
    return shaped(gradients.results(), call)
