"""rope and rms_norm_rope: the tables of cos and sin."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.rope.rope import holds_matrices, rotated_columns
from . import checks
from .lines import also, gives

gives("like", "rope", "rms_norm_rope")(checks.in_layout_of)


@also("rope", "rms_norm_rope", shapes=("cos", "sin"))
def tables(call: Any) -> None:
    op, cos, sections = checks.op(call), call.cos, call.sections
    q_name = "q" if hasattr(call, "q") else "dq"
    _check_dtypes(call)
    B, _, S, D = getattr(call, q_name).shape
    # Without the last two dimensions, a table of 2x2 matrices has the shape of one of numbers.
    of_matrices = holds_matrices(cos, call.sin)
    per_pair = call.per_pair or call.sin is None
    columns = "R/2" if per_pair else "R"
    last = ", 2, 2)" if of_matrices else ")"
    shape = cos.shape[:-2] if of_matrices else cos.shape
    if sections is None:
        accepted = f"(S, {columns}{last}, (1, S, {columns}{last} or (B, S, {columns}{last}"
        leading_is_right = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, B))
    else:
        accepted = f"(3, 1, S, {columns}) or (3, B, S, {columns}), with sections,"
        leading_is_right = len(shape) == 4 and shape[0] == 3 and shape[1] in (1, B)
    if not leading_is_right or shape[-2] != S:
        raise ValueError(
            f"{op}: cos must be {accepted} for {q_name}'s S of {S} and B of {B},"
            f" got shape {tuple(cos.shape)}"
        )
    R = rotated_columns(cos, call.sin, per_pair)
    if per_pair and not 2 <= R <= D:
        raise ValueError(
            f"{op}: cos must have from 1 column to half of {q_name}'s D of {D}, one for each pair,"
            f" got {shape[-1]}"
        )
    if not 2 <= R <= D or R % 2 != 0:
        raise ValueError(
            f"{op}: cos must have an even number of columns from 2 to {q_name}'s D of {D}, got {R}"
        )
    if sections is not None and (len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != R):
        raise ValueError(
            f"{op}: sections must be three counts of pairs that add up to R/2, {R // 2},"
            f" got {list(sections)}"
        )
    checks.shape(call, "sin", cos.shape, "cos")
    if call.deinterleave and not (call.interleaved or call.sin is None):
        raise ValueError(
            f"{op}: deinterleave must be False with interleaved=False, for pairs in halves, got"
            " True"
        )


def _check_dtypes(call: Any) -> None:
    op, cos, sin = checks.op(call), call.cos, call.sin
    if not cos.is_complex():
        checks.floating(call, "cos", "sin")
        if sin is None and (cos.dim() < 4 or cos.shape[-2:] != (2, 2)):
            raise ValueError(
                f"{op}: sin must be given with a real cos, except matrices (..., S, R/2, 2, 2),"
                f" got None and a cos of shape {tuple(cos.shape)}"
            )
        if sin is None and call.sections is not None:
            raise ValueError(
                f"{op}: sections must be None with matrices, got {list(call.sections)}"
            )
        return
    if cos.dtype not in (torch.complex64, torch.complex128):
        raise TypeError(
            f"{op}: a complex cos must be torch.complex64 or torch.complex128, got {cos.dtype}"
        )
    if sin is not None:
        raise ValueError(
            f"{op}: sin must be None with a complex cos, which holds it, got a tensor of shape"
            f" {tuple(sin.shape)}"
        )
