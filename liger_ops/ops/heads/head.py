"""The linear layer of linear_cross_entropy, for its definition and its kernels' host code: dtypes,
its LoRA, and the layer's gradients from those of its logits.

The tensors of a head are x, weight, bias, lora_x and lora_b. Masks and gradients are in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..precision import widened
from .scaling import scale

Value = TypeVar("Value")


def cast_for_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast, if it is on, casts the inputs of matrix products."""
    device = tensors[0].device.type
    # Dynamo of torch 2.11 does not trace is_autocast_available; every device it compiles for has
    # autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not (known and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if lower else tensor

    return tuple(map(cast, tensors))


def cast_as_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast x, weight and bias as autocast, if it is on, casts the inputs of a linear layer."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    cast = cast_for_products(*tensors)
    return cast[0], cast[1], cast[2] if len(cast) > 2 else None


def needed_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, reduction: str,
    lora_x: Tensor | None = None, lora_b: Tensor | None = None,
) -> list[bool]:  # fmt: skip
    """Whether the forward should compute the gradient of each of the head's tensors."""
    in_forward = torch.is_grad_enabled() and reduction != "none"
    return [
        in_forward and tensor is not None and tensor.requires_grad
        for tensor in (x, weight, bias, lora_x, lora_b)
    ]


class Product(NamedTuple):
    """A product rows @ weight.T. Logits are the sum of x's with weight and lora_x's with lora_b."""

    rows: Tensor
    weight: Tensor

    @property
    def of_words(self) -> Product:
        """Seen from the words, weight has a row for each, and the tokens are the layer's weight."""
        return Product(self.weight, self.rows)


def products_of(
    rows: Tensor, weight: Tensor, lora_x: Tensor | None, lora_b: Tensor | None
) -> list[Product]:
    """The products of a head, with one row of x and of lora_x per token."""
    products = [Product(rows, weight)]
    if lora_x is not None and lora_b is not None:
        products.append(Product(lora_x.reshape(rows.shape[0], lora_x.shape[-1]), lora_b))
    return products


def of_words(values: Sequence[Value]) -> list[Value]:
    """Values of a head's tensors, where x and weight, and lora_x and lora_b, change places."""
    x, weight, bias, lora_x, lora_b = values
    return [weight, x, bias, lora_b, lora_x]


def linear(
    products: Sequence[Product], bias: Tensor | None,
    tokens: slice = slice(None), words: slice = slice(None),
) -> Tensor:  # fmt: skip
    """The logits of some tokens and words. The second product adds to the first, which is rounded
    before, and the sum is rounded again."""
    (rows, weight), *others = products
    part = None if bias is None else bias[words]
    logits = torch.nn.functional.linear(rows[tokens], weight[words], part)
    for rows, weight in others:
        logits = torch.addmm(logits, rows[tokens], weight[words].t())
    return logits


def accumulation_dtype(weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the gradient of weight is summed."""
    if accum_dtype is not None:
        return accum_dtype
    return torch.float64 if weight.dtype is torch.float64 else torch.float32


def rounds_once(weight: Tensor, accum_dtype: torch.dtype | None) -> bool:
    """Whether the gradient of weight from a single chunk is a product in weight's dtype, without a
    wider sum. A float16 product may overflow where the sum does not."""
    return accum_dtype is None and weight.dtype is torch.bfloat16


def forward_gradient_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of a gradient that the forward computes and the backward scales: float32 for float16,
    so that loss scaling cannot make it overflow or vanish."""
    return torch.float32 if weight.dtype is torch.float16 else weight.dtype


def forward_dweight_dtype(weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of the gradient of weight that the forward computes and the backward scales."""
    accumulated = accumulation_dtype(weight, accum_dtype)
    return accumulated if weight.dtype is torch.float16 else weight.dtype


def flattened(
    x: Tensor, target: Tensor, token_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Flatten x, target and token_weight to one row per token."""
    token_weights = None if token_weight is None else token_weight.reshape(-1)
    return x.reshape(target.numel(), x.shape[-1]), target.reshape(-1), token_weights


def divisor(
    reduction: str, total_weight: Tensor, num_items_in_batch: Tensor | None
) -> Tensor | int:
    """The number by which a reduction divides the sum of the losses."""
    if reduction != "mean":
        return 1
    return total_weight if num_items_in_batch is None else num_items_in_batch.to(total_weight.dtype)


def upstream_of_tokens(
    dloss: Tensor | None, dz_loss: Tensor | None, dlse: Tensor | None, dtarget_logit: Tensor | None,
    lse: Tensor, reduction: str, total_weight: Tensor, num_items_in_batch: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of each token's own loss, z-loss, lse and target logit."""
    items = divisor(reduction, total_weight, num_items_in_batch)
    reduced = [None if grad is None else grad.to(lse.dtype) / items for grad in (dloss, dz_loss)]
    per_token = [None if grad is None else grad.to(lse.dtype) for grad in (dlse, dtarget_logit)]
    return [
        None if grad is None else grad.expand(lse.shape).reshape(-1)
        for grad in (*reduced, *per_token)
    ]


def factors_of(
    dloss: Tensor, target: Tensor | None, ignore_index: int, divisor: Tensor | int
) -> tuple[Tensor, ...]:
    """The backward's factors for the gradients from the forward. Without targets all tokens
    count."""
    factor = dloss / divisor
    of_rows = factor.reshape(1, 1)
    if target is not None:
        # An ignored token has no gradient, even if all are ignored and the mean is NaN.
        kept = target != ignore_index
        of_rows = torch.where(kept, factor, 0.0).unsqueeze(-1)
        factor = torch.where(kept.any(), factor, 0.0)
    of_weight = factor.reshape(1, 1)
    return of_rows, of_weight, factor.reshape(1), of_rows, of_weight


def finished_in_forward(
    dloss: Tensor | None, computed: Sequence[Tensor | None], output_mask: Sequence[bool],
    target: Tensor | None, ignore_index: int, divisor: Tensor | int, dtype: torch.dtype,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients that are wanted, from those that the forward computed: times dloss and the
    reduction's factor."""
    if dloss is None or all(gradient is None for gradient in computed):
        return [None] * len(computed)
    finished: list[Tensor | None] = []
    factors = factors_of(dloss, target, ignore_index, divisor)
    for wanted, gradient, factor in zip(output_mask, computed, factors, strict=True):
        result = None
        if wanted and gradient is not None:
            result = torch.empty_like(gradient, dtype=dtype)
            scale(gradient, factor, result)
        finished.append(result)
    return finished


def still_missing(wanted: list[bool], finished: Sequence[Tensor | None]) -> list[bool]:
    """Which gradients are wanted, but not yet computed."""
    return [want and gradient is None for want, gradient in zip(wanted, finished, strict=True)]


def both(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradient of each pair that is not None."""
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def shaped(
    gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients in the shapes of the tensors that they are the gradients of."""
    return tuple(
        None if gradient is None or tensor is None else gradient.reshape(tensor.shape)
        for gradient, tensor in zip(gradients, tensors, strict=True)
    )


class Gradients:
    """The gradients of a head's tensors, accumulated over the chunks of logits."""

    def __init__(
        self, products: Sequence[Product],
        mask: Sequence[bool], accum_dtype: torch.dtype | None, in_forward: bool,
    ) -> None:  # fmt: skip
        weight = products[0].weight
        self.products = products
        self.mask = mask
        self.accumulated = accumulation_dtype(weight, accum_dtype)
        self.dtype = self.dweight_dtype = weight.dtype
        if in_forward:
            self.dtype = forward_gradient_dtype(weight)
            self.dweight_dtype = forward_dweight_dtype(weight, accum_dtype)
        self.drows: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.dweights: list[Tensor | None] = [None, None]
        self.dbias: Tensor | None = None

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        wanted = (self.mask[:2], self.mask[3:])
        for i, ((rows, weight), mask) in enumerate(zip(self.products, wanted, strict=False)):
            if mask[0]:
                self.drows[i].append(_product(dlogits, weight, self.dtype))
            if mask[1]:
                part = _product(dlogits.t(), rows[chunk], self.accumulated)
                self.dweights[i] = _sum(self.dweights[i], part)
        if self.mask[2]:
            self.dbias = _sum(self.dbias, widened(dlogits).sum(0))

    def results(self) -> list[Tensor | None]:
        dx, dlora_x = (torch.cat(parts) if parts else None for parts in self.drows)
        dweight, dlora_b = (
            None if total is None else total.to(self.dweight_dtype) for total in self.dweights
        )
        dbias = None if self.dbias is None else self.dbias.to(self.dtype)
        return [dx, dweight, dbias, dlora_x, dlora_b]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(dtype), b.to(dtype))


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
