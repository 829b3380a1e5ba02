"""rope: checks and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...ops.rope.rope import holds_matrices, rotated_columns
from .. import checks


@library.fake("rope")
def rope(call: Any) -> tuple[Tensor, Tensor]:
    check(call, "q", "k")
    return checks.in_layout_of(call.q), checks.in_layout_of(call.k)


@library.fake("rope_backward")
def rope_backward(call: Any) -> tuple[Tensor | None, ...]:
    check(call, "dq", "dk")
    return checks.gradients(call, "dq", "dk", allocate=checks.in_layout_of)


def check(call: Any, q_name: str, k_name: str) -> None:
    """Check two tensors of heads, and the tables of cos and sin that rotate them."""
    op, q, k = checks.op(call), getattr(call, q_name), getattr(call, k_name)
    cos, sections = call.cos, call.sections
    checks.floating(call, q_name, k_name)
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: {k_name} must have {q_name}'s dtype, {q.dtype}, got {k.dtype}")
    _check_table_dtypes(call)
    if q.dim() != 4:
        raise ValueError(f"{op}: {q_name} must be (B, heads, S, D), got shape {tuple(q.shape)}")
    checks.same_device(call, q_name, k_name, "cos", "sin")
    B, _, S, D = q.shape
    if k.dim() != 4 or k.shape[0] != B or k.shape[2] != S or k.shape[3] != D:
        raise ValueError(
            f"{op}: {k_name} must have the shape of {q_name} but for the heads,"
            f" {(B, 'heads', S, D)}, got {tuple(k.shape)}"
        )
    # A table per pair or element is one per matrix without the two dimensions of a matrix.
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


def _check_table_dtypes(call: Any) -> None:
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
