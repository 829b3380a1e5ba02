"""The linear layer of linear_cross_entropy, for its definition and its kernels' host code: dtypes,
and the layer's gradients from those of its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import widened


def cast_as_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast x, weight and bias as autocast, if it is on, casts the inputs of a linear layer."""
    device = x.device.type
    # Dynamo of torch 2.11 does not trace is_autocast_available; every device it compiles for has
    # autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not (known and torch.is_autocast_enabled(device)):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if lower else tensor

    return cast(x), cast(weight), None if bias is None else cast(bias)


def needed_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, reduction: str) -> list[bool]:
    """Whether the forward should compute the gradients of x, weight and bias."""
    in_forward = torch.is_grad_enabled() and reduction != "none"
    return [
        in_forward and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    ]


def accumulation_dtype(weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the gradient of weight is summed."""
    if accum_dtype is not None:
        return accum_dtype
    return torch.float64 if weight.dtype is torch.float64 else torch.float32


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
    dloss: Tensor, target: Tensor, ignore_index: int, divisor: Tensor | int
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward's factors for the gradients of x, weight and bias from the forward."""
    factor = dloss / divisor
    # An ignored token has no gradient, even if all are ignored and the mean is NaN.
    kept = target != ignore_index
    of_rows = torch.where(kept, factor, 0.0).unsqueeze(-1)
    factor = torch.where(kept.any(), factor, 0.0)
    return of_rows, factor.reshape(1, 1), factor.reshape(1)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty_like(gradient, dtype=dtype)
    scale(gradient, factor, result)
    return result


def scale(gradient: Tensor, factor: Tensor, result: Tensor) -> None:
    """Fill result with gradient * factor, multiplied in factor's float32 and rounded once. With
    out=, the float32 product is never in memory."""
    torch.mul(gradient, factor, out=result)


def still_missing(wanted: list[bool], finished: Sequence[Tensor | None]) -> list[bool]:
    """Which gradients are wanted, but not yet computed."""
    return [want and gradient is None for want, gradient in zip(wanted, finished, strict=True)]


def both(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of each pair that is not None."""
    dx, dweight, dbias = (b if a is None else a for a, b in zip(first, second, strict=True))
    return dx, dweight, dbias


class Gradients:
    """The gradients of x, weight and bias, accumulated over the chunks of logits."""

    def __init__(
        self, weight: Tensor,
        mask: tuple[bool, ...] | list[bool], accum_dtype: torch.dtype | None, in_forward: bool,
    ) -> None:  # fmt: skip
        self.weight = weight
        self.mask = mask
        self.accumulated = accumulation_dtype(weight, accum_dtype)
        self.dtype = self.dweight_dtype = weight.dtype
        if in_forward:
            self.dtype = forward_gradient_dtype(weight)
            self.dweight_dtype = forward_dweight_dtype(weight, accum_dtype)
        self.dx: list[Tensor] = []
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        if self.mask[0]:
            self.dx.append(_product(dlogits, self.weight, self.dtype))
        if self.mask[1]:
            self.dweight = _sum(self.dweight, _product(dlogits.t(), x, self.accumulated))
        if self.mask[2]:
            self.dbias = _sum(self.dbias, widened(dlogits).sum(0))

    def of(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx = torch.cat(self.dx).reshape(x.shape) if self.dx else None
        dweight = None if self.dweight is None else self.dweight.to(self.dweight_dtype)
        return dx, dweight, None if self.dbias is None else self.dbias.to(self.dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(dtype), b.to(dtype))


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
