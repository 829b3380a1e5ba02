"""linear_cross_entropy: checks and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library
from ..ops.head import waiting_dtype, waiting_weight_dtype
from . import checks
from .cross_entropy import check_gradients, check_options, check_target, loss_dtype


@library.fake("linear_cross_entropy_forward")
def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
    return_predicted: bool = False,
    return_entropy: bool = False,
    gradient_mask: tuple[bool, ...] | list[bool] = (False, False, False),
) -> tuple[Tensor | None, ...]:
    op = "linear_cross_entropy"
    _check_tensors(op, x, weight, target, bias, class_weight, token_weight)
    check_options(
        op,
        x,
        "x",
        num_items_in_batch,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
    )
    _check_work(op, weight, bias, accum_dtype, chunk_bytes, "gradient_mask", gradient_mask)
    if reduction == "none" and any(gradient_mask):
        raise ValueError(
            f"{op}: gradient_mask must be all False for the reduction 'none', whose gradient the"
            f" backward computes, got {list(gradient_mask)}"
        )
    dtype = loss_dtype(x)
    shape = target.shape if reduction == "none" else ()
    waiting = waiting_dtype(weight)
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=dtype),
        x.new_empty(target.shape, dtype=dtype),
        x.new_empty(target.shape, dtype=dtype),
        x.new_empty((), dtype=dtype),
        x.new_empty(target.shape, dtype=torch.int64) if return_predicted else None,
        x.new_empty(target.shape, dtype=dtype) if return_entropy else None,
        checks.like(x, waiting) if gradient_mask[0] else None,
        checks.like(weight, waiting_weight_dtype(weight, accum_dtype))
        if gradient_mask[1]
        else None,
        checks.like(bias, waiting) if gradient_mask[2] and bias is not None else None,
    )


@library.fake("linear_cross_entropy_backward")
def linear_cross_entropy_backward(
    dloss: Tensor | None,
    dz_loss: Tensor | None,
    dlse: Tensor | None,
    dtarget_logit: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | None,
    lse: Tensor,
    total_weight: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    op = "linear_cross_entropy_backward"
    _check_tensors(op, x, weight, target, bias, class_weight, token_weight)
    check_options(
        op,
        x,
        "x",
        num_items_in_batch,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
    )
    check_gradients(
        op, x, "x", target, reduction, dloss, dz_loss, dlse, dtarget_logit, lse, total_weight
    )
    checks.floating(op, dx=dx, dweight=dweight, dbias=dbias)
    checks.same_device(op, x, dx=dx, dweight=dweight, dbias=dbias)
    for name, tensor, of in (("dx", dx, "x"), ("dweight", dweight, "weight")):
        checks.shape(op, name, tensor, (x if of == "x" else weight).shape, of)
    checks.shape(op, "dbias", dbias, (weight.shape[0],), "weight's rows")
    _check_work(op, weight, bias, accum_dtype, chunk_bytes, "output_mask", output_mask)
    return (
        checks.like_if(output_mask[0], x),
        checks.like_if(output_mask[1], weight),
        checks.like_if(output_mask[2], bias),
    )


def _check_tensors(
    op: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
) -> None:
    checks.floating(op, x=x, weight=weight, bias=bias, class_weight=class_weight)
    checks.at_least_dims(op, x, 1, "(..., D)")
    checks.same_device(op, x, weight=weight, bias=bias, class_weight=class_weight)
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != D:
        raise ValueError(
            f"{op}: weight must be (V, D) with D of x, {D}, and at least one class,"
            f" got {tuple(weight.shape)}"
        )
    V = weight.shape[0]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not x.dtype:
            raise TypeError(f"{op}: {name} must have x's dtype, {x.dtype}, got {tensor.dtype}")
    check_target(op, x, "x", target, token_weight)
    checks.shape(op, "bias", bias, (V,), "weight's rows")
    checks.shape(op, "class_weight", class_weight, (V,), "weight's rows")


def _check_work(
    op: str,
    weight: Tensor,
    bias: Tensor | None,
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    mask_name: str,
    mask: tuple[bool, ...] | list[bool],
) -> None:
    accepted = {weight.dtype, torch.float64 if weight.dtype is torch.float64 else torch.float32}
    if accum_dtype is not None and accum_dtype not in accepted:
        names = " or ".join(sorted(map(str, accepted)))
        raise ValueError(f"{op}: accum_dtype must be {names} or None, got {accum_dtype}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"{op}: chunk_bytes must be above 0 or None, got {chunk_bytes}")
    if mask[2] and bias is None:
        raise ValueError(f"{op}: {mask_name}[2] must be False without a bias, got {list(mask)}")
