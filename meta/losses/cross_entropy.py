"""cross_entropy: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.losses.cross_entropy import REDUCTIONS
from .. import checks
from ..lines import also


def losses(call: Any, x: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the results of a loss's forward; x is the logits or the linear layer's input."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    tokens = call.target.shape
    shape = tokens if call.reduction == "none" else ()
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=dtype),
        x.new_empty(tokens, dtype=dtype),
        x.new_empty(tokens, dtype=dtype),
        x.new_empty((), dtype=dtype),
        x.new_empty(tokens, dtype=torch.int64) if call.return_predicted else None,
        x.new_empty(tokens, dtype=dtype) if call.return_entropy else None,
        x.new_empty(tokens, dtype=dtype),
    )


def check_target(call: Any, x: str, name: str = "target") -> None:
    """Check the targets, whose shape is that of `x` without its last dimension."""
    dtype = getattr(call, name).dtype
    if dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{checks.op(call)}: {name} must be int64 or int32, got {dtype}")
    checks.same_device(call, x, name)
    checks.shape(call, name, getattr(call, x).shape[:-1], f"{x} but for its last dimension")


def check_token_weight(call: Any, x: str) -> None:
    checks.floating(call, "token_weight")
    checks.same_device(call, x, "token_weight")
    checks.shape(call, "token_weight", call.target.shape, "target")


def check_reduction(call: Any, x: str) -> None:
    op, items = checks.op(call), call.num_items_in_batch
    checks.choice(call, "reduction", REDUCTIONS)
    if items is not None:
        if items.dtype is torch.bool or items.dtype.is_complex:
            raise TypeError(f"{op}: num_items_in_batch must be a number, got {items.dtype}")
        checks.same_device(call, x, "num_items_in_batch")
        checks.shape(call, "num_items_in_batch", (), "a number")
        divisor(call)


def divisor(call: Any) -> None:
    if call.num_items_in_batch is not None and call.reduction != "mean":
        raise ValueError(
            f"{checks.op(call)}: num_items_in_batch must be None but for the reduction 'mean',"
            f" which divides by it, got one for {call.reduction!r}"
        )


@also("cross_entropy")
def options(call: Any) -> None:
    checks.at_least_one(call, "logits", "class")
    divisor(call)


@also("log_prob")
def classes(call: Any) -> None:
    checks.at_least_one(call, "logits", "class")


def check_options(call: Any, x: str) -> None:
    op = checks.op(call)
    check_reduction(call, x)
    if not 0 <= call.label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be from 0 to 1, got {call.label_smoothing}")
    if not 0 <= call.lse_square_scale < float("inf"):
        raise ValueError(
            f"{op}: lse_square_scale must be a number of at least 0, got {call.lse_square_scale}"
        )
    checks.positive(call, "softcap", "logit_scale")


def check_gradients(call: Any, x: str) -> None:
    """Check a backward op's arguments that are results of the forward, or gradients of these."""
    reduced, per_token = ("dloss", "dz_loss"), ("dlse", "dtarget_logit", "lse", "lse_error")
    checks.floating(call, *reduced, *per_token, "total_weight")
    checks.same_device(call, x, *reduced, *per_token, "total_weight")
    tokens = call.target.shape
    for name in reduced:
        expected = tokens if call.reduction == "none" else ()
        checks.shape(call, name, expected, f"the loss, reduced by {call.reduction!r}")
    for name in per_token:
        checks.shape(call, name, tokens, "target")
    checks.shape(call, "total_weight", (), "a number")
