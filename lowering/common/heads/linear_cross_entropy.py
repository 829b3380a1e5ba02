"""linear_cross_entropy on a device: PyTorch's matrix products, a chunk of rows at a time, and
between them the row functions of the device's cross_entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.chunks import chunks
from ....ops.heads.head import (
    Product,
    accumulation_dtype,
    both,
    divisor,
    factors_of,
    products_of,
    rounds_once,
    still_missing,
    upstream_of_tokens,
)
from ....ops.heads.scaling import scales
from ..losses.cross_entropy import given_tokens, tokens_of
from ..sizes import cdiv


@dataclass(frozen=True)
class ChunkedLinear:
    """The products of a head and its bias, and the chunks of tokens in which its logits are
    computed."""

    products: list[Product]
    bias: Tensor | None
    stride: int
    slices: list[slice]
    # The dtype in which the gradients of weight and lora_b are summed.
    sum_dtype: torch.dtype

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk of tokens and its logits, whose memory the next chunk reuses."""
        rows, weight = self.products[0]
        V = weight.shape[0]
        memory = None
        for chunk in self.slices:
            m = chunk.stop - chunk.start
            if memory is None:
                memory = rows.new_empty(m, self.stride)
            logits = memory[:m, :V] if self.stride > V else memory[:m]
            linear(logits, self.products, self.bias, tokens=chunk)
            yield chunk, logits


def linear(
    logits: Tensor, products: Sequence[Product], bias: Tensor | None,
    tokens: slice = slice(None), words: slice = slice(None),
) -> None:  # fmt: skip
    """Fill logits with those of some tokens and words. The second product is added to the first in
    the memory of the logits."""
    (rows, weight), *others = products
    if bias is None:
        torch.mm(rows[tokens], weight[words].t(), out=logits)
    else:
        torch.addmm(bias[words], rows[tokens], weight[words].t(), out=logits)
    for rows, weight in others:
        logits.addmm_(rows[tokens], weight[words].t())


def chunked_linear(
    products: list[Product], bias: Tensor | None, dweight: Tensor | None, alignment: int,
    accum_dtype: torch.dtype | None, chunk_bytes: int | None, other_bytes: int = 0,
) -> ChunkedLinear:  # fmt: skip
    """A head in chunks of tokens. Each row of logits starts at a multiple of `alignment` elements;
    a chunk has `other_bytes` more a row."""
    rows, weight = products[0]
    stride = cdiv(weight.shape[0], alignment) * alignment
    sum_dtype = accumulation_dtype(weight, accum_dtype)
    later_bytes = saved_bytes = 0
    once = rounds_once(weight, accum_dtype)
    if dweight is not None and dweight.dtype is not sum_dtype:
        # Several chunks: memory holds the sum and one chunk, and after the last chunk the sum and
        # its rounded copy. One chunk: memory holds the chunk and the rounded product, without a
        # sum.
        later_bytes = dweight.numel() * dweight.itemsize
        if once:
            saved_bytes = dweight.numel() * (sum_dtype.itemsize - dweight.itemsize)
    row_bytes = stride * rows.itemsize + other_bytes
    slices = list(chunks(rows.shape[0], row_bytes, chunk_bytes, later_bytes, saved_bytes))
    if once and len(slices) == 1:
        sum_dtype = weight.dtype
    return ChunkedLinear(products, bias, stride, slices, sum_dtype)


def head_of(call: Any, dweight: Tensor | None, alignment: int) -> ChunkedLinear:
    """The head of a call that has one, in chunks of tokens."""
    rows = call.x.reshape(call.target.numel(), call.x.shape[-1])
    products = products_of(rows, call.weight, call.lora_x, call.lora_b)
    bounds = (call.accum_dtype, call.chunk_bytes)
    return chunked_linear(products, call.bias, dweight, alignment, *bounds)


class Gradients:
    """The gradients of a head's tensors, accumulated over the chunks of logits.

    They are written to the op's outputs, which are given in the order of the masks. The gradients
    of weight and lora_b may first be summed in another dtype.
    """

    def __init__(
        self, products: Sequence[Product], outputs: Sequence[Tensor | None],
        sum_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        dx, dweight, self.dbias, dlora_x, dlora_b = outputs
        self.products = [
            _OfProduct(product, drows, dweight, sum_dtype)
            for product, drows, dweight in zip(
                products, (dx, dlora_x), (dweight, dlora_b), strict=False
            )
        ]
        bias = self.dbias
        self.bias_sum = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        for part in self.products:
            part.add(chunk, dlogits)
        if self.bias_sum is not None:
            self.bias_sum += dlogits.sum(0, dtype=torch.float32)

    def rounded(self) -> list[Tensor | None]:
        of_products = [part.rounded() for part in self.products]
        (dx, dweight), (dlora_x, dlora_b), *_ = (*of_products, (None, None))
        if self.dbias is not None and self.bias_sum is not None:
            self.dbias.copy_(self.bias_sum)
        return [dx, dweight, self.dbias, dlora_x, dlora_b]


class _OfProduct:
    """The gradients of one product's rows and weight."""

    def __init__(
        self, product: Product, drows: Tensor | None, dweight: Tensor | None,
        sum_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.rows, self.weight = product
        # The outputs have the shapes of the op's arguments.
        self.drows = drows
        self.drows_2d = None if drows is None else drows.view(self.rows.shape)
        self.output = None if dweight is None else (dweight.shape, dweight.dtype)
        self.dweight = None if dweight is None else dweight.view(self.weight.shape)
        if self.dweight is not None and self.dweight.dtype is not sum_dtype:
            # The op's output is allocated after the last chunk, when the logits are freed.
            self.dweight = torch.empty_like(self.dweight, dtype=sum_dtype)

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        if self.drows_2d is not None:
            product(self.drows_2d[chunk], dlogits, self.weight, add=False)
        if self.dweight is not None:
            product(self.dweight, dlogits.t(), self.rows[chunk], add=chunk.start > 0)

    def rounded(self) -> tuple[Tensor | None, Tensor | None]:
        if self.dweight is None or self.output is None:
            return self.drows, None
        shape, dtype = self.output
        self.dweight = self.dweight.to(dtype).view(shape)
        return self.drows, self.dweight


def product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """total = a @ b, or total += a @ b; total may be float32 if a and b are narrower."""
    if total.dtype is not a.dtype and a.is_cuda:
        # The product is added to total as it is written: no other (V, D) is in memory.
        if add:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
        else:
            torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
        return
    if total.dtype is not a.dtype and a.dtype is torch.bfloat16:
        part = torch.mm(a, b)
        if add:
            total += part
        else:
            total.copy_(part)
        return
    # Convert first: a product in float16 would overflow.
    a, b = a.to(total.dtype), b.to(total.dtype)
    if add:
        total.addmm_(a, b)
    else:
        torch.mm(a, b, out=total)


def register(device: str, kernels: Any, scale: Callable[..., None], alignment: int) -> None:
    """Register the ops with the row functions of the module `kernels`.

    `scale` is the device's own: see `scaling`. Each row of logits starts at a multiple of
    `alignment` elements.
    """
    scales[device] = scale
    module = kernels.__name__

    # allocates=True, so that the output of a gradient is not in memory beside its wider sum.
    @library.kernel("linear_cross_entropy_forward", device, allocates=True, module=module)
    def linear_cross_entropy_forward(call):
        return _forward(call, kernels, alignment)

    @library.kernel("linear_cross_entropy_backward", device, allocates=True, module=module)
    def linear_cross_entropy_backward(call):
        return _backward(call, kernels, scale, alignment)


def _forward(call: Any, kernels: Any, alignment: int) -> tuple[Tensor | None, ...]:
    allocated = library.allocate("linear_cross_entropy_forward", call)
    outputs, computed = allocated[:-5], allocated[-5:]
    del allocated
    tokens = tokens_of(call, call.class_weight, *outputs)
    head = head_of(call, computed[1], alignment)
    gradients = Gradients(head.products, computed, head.sum_dtype)
    del computed
    for chunk, logits in head.logits():
        kernels.loss_and_gradient(call, logits, tokens.chunk(chunk), any(call.gradient_mask))
        gradients.add(chunk, logits)
    del logits
    loss, z_loss, _, _, total_weight, *_ = outputs
    kernels.reduce(call, call.weight.shape[0], tokens, loss, z_loss, total_weight)
    return (*outputs, *gradients.rounded())


def _backward(
    call: Any, kernels: Any, scale: Callable[..., None], alignment: int
) -> tuple[Tensor | None, ...]:
    results = library.allocate("linear_cross_entropy_backward", call)
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    finished: list[Tensor | None] = [None] * len(computed)
    if call.dloss is not None and any(gradient is not None for gradient in computed):
        items = divisor(call.reduction, call.total_weight, call.num_items_in_batch)
        factors = factors_of(call.dloss, call.target, call.ignore_index, items)
        for i, (gradient, result) in enumerate(zip(computed, results, strict=True)):
            if gradient is not None and result is not None:
                scale(gradient, factors[i], result)
                finished[i] = result
    if not any(still_missing(call.output_mask, finished)):
        return tuple(finished)
    tokens = given_tokens(call, call.class_weight)
    upstream = upstream_of_tokens(
        call.dloss, call.dz_loss, call.dlse, call.dtarget_logit,
        call.lse, call.reduction, call.total_weight, call.num_items_in_batch,
    )  # fmt: skip
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    head = head_of(call, unfinished[1], alignment)
    gradients = Gradients(head.products, unfinished, head.sum_dtype)
    del results, unfinished
    for chunk, logits in head.logits():
        grads = [None if grad is None else grad[chunk] for grad in (*upstream, None)]
        kernels.gradient(call, grads, logits, tokens.chunk(chunk), logits)
        gradients.add(chunk, logits)
    del logits
    return both(finished, gradients.rounded())
