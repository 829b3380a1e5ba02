"""cross_entropy: checks and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library
from ..ops.cross_entropy import REDUCTIONS
from . import checks


@library.fake("cross_entropy_forward")
def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_predicted: bool = False,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    op = "cross_entropy"
    _check_tensors(op, logits, target, weight, token_weight)
    check_options(
        op,
        logits,
        "logits",
        num_items_in_batch,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
    )
    dtype = loss_dtype(logits)
    shape = target.shape if reduction == "none" else ()
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(target.shape, dtype=dtype),
        logits.new_empty(target.shape, dtype=dtype),
        logits.new_empty((), dtype=dtype),
        logits.new_empty(target.shape, dtype=torch.int64) if return_predicted else None,
        logits.new_empty(target.shape, dtype=dtype) if return_entropy else None,
    )


@library.fake("cross_entropy_backward")
def cross_entropy_backward(
    dloss: Tensor | None,
    dz_loss: Tensor | None,
    dlse: Tensor | None,
    dtarget_logit: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | None,
    lse: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:
    op = "cross_entropy_backward"
    _check_tensors(op, logits, target, weight, token_weight)
    check_options(
        op,
        logits,
        "logits",
        num_items_in_batch,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
    )
    check_gradients(
        op,
        logits,
        "logits",
        target,
        reduction,
        dloss,
        dz_loss,
        dlse,
        dtarget_logit,
        lse,
        total_weight,
    )
    return checks.like(logits)


def loss_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of the loss, and of its arithmetic."""
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _check_tensors(
    op: str, logits: Tensor, target: Tensor, weight: Tensor | None, token_weight: Tensor | None
) -> None:
    checks.floating(op, logits=logits)
    checks.at_least_dims(op, logits, 1, "(..., V)", "logits")
    V = logits.shape[-1]
    if V < 1:
        raise ValueError(f"{op}: logits must have at least one class, got {tuple(logits.shape)}")
    check_target(op, logits, "logits", target, token_weight)
    checks.floating(op, weight=weight)
    checks.same_device(op, logits, "logits", weight=weight)
    checks.shape(op, "weight", weight, (V,), "(V,)")


def check_target(
    op: str, x: Tensor, x_name: str, target: Tensor, token_weight: Tensor | None
) -> None:
    """target and token_weight, of x's shape but for its last dimension."""
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32, got {target.dtype}")
    checks.floating(op, token_weight=token_weight)
    checks.same_device(op, x, x_name, target=target, token_weight=token_weight)
    leading = f"{x_name} but for its last dimension"
    checks.shape(op, "target", target, x.shape[:-1], leading)
    checks.shape(op, "token_weight", token_weight, target.shape, "target")


def check_options(
    op: str,
    x: Tensor,
    x_name: str,
    num_items_in_batch: Tensor | None,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logit_scale: float,
) -> None:
    checks.choice(op, "reduction", reduction, REDUCTIONS)
    if num_items_in_batch is not None:
        dtype = num_items_in_batch.dtype
        if dtype is torch.bool or dtype.is_complex:
            raise TypeError(f"{op}: num_items_in_batch must be a number, got {dtype}")
        checks.same_device(op, x, x_name, num_items_in_batch=num_items_in_batch)
        checks.shape(op, "num_items_in_batch", num_items_in_batch, (), "a number")
        if reduction != "mean":
            raise ValueError(
                f"{op}: num_items_in_batch must be None but for the reduction 'mean', which divides"
                f" by it, got one for {reduction!r}"
            )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not 0 <= lse_square_scale < float("inf"):
        raise ValueError(
            f"{op}: lse_square_scale must be a number of at least 0, got {lse_square_scale}"
        )
    for name, value in (("softcap", softcap), ("logit_scale", logit_scale)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{op}: {name} must be a number above 0, got {value}")


def check_gradients(
    op: str,
    x: Tensor,
    x_name: str,
    target: Tensor,
    reduction: str,
    dloss: Tensor | None,
    dz_loss: Tensor | None,
    dlse: Tensor | None,
    dtarget_logit: Tensor | None,
    lse: Tensor,
    total_weight: Tensor,
) -> None:
    """What a backward op takes of the forward's results and their gradients."""
    reduced = {"dloss": dloss, "dz_loss": dz_loss}
    per_token = {"dlse": dlse, "dtarget_logit": dtarget_logit, "lse": lse}
    checks.floating(op, **reduced, **per_token, total_weight=total_weight)
    checks.same_device(op, x, x_name, **reduced, **per_token, total_weight=total_weight)
    for name, tensor in reduced.items():
        expected = target.shape if reduction == "none" else ()
        checks.shape(op, name, tensor, expected, f"the loss, reduced by {reduction!r}")
    for name, tensor in per_token.items():
        checks.shape(op, name, tensor, target.shape, "target")
    checks.shape(op, "total_weight", total_weight, (), "a number")
