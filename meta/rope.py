"""rope: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("rope")
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    _check("rope", q, k, cos, sin)
    return checks.in_layout_of(q), checks.in_layout_of(k)


@library.fake("rope_backward")
def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    _check("rope_backward", dq, dk, cos, sin, "d")
    needs_q, needs_k = output_mask
    return (
        checks.in_layout_of(dq) if needs_q else None,
        checks.in_layout_of(dk) if needs_k else None,
    )


def _check(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, prefix: str = "") -> None:
    q_name, k_name = f"{prefix}q", f"{prefix}k"
    checks.floating(op, **{q_name: q, k_name: k}, cos=cos, sin=sin)
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: {k_name} must have {q_name}'s dtype, {q.dtype}, got {k.dtype}")
    if q.dim() != 4:
        raise ValueError(f"{op}: {q_name} must be (B, heads, S, D), got shape {tuple(q.shape)}")
    checks.same_device(op, q, q_name, **{k_name: k}, cos=cos, sin=sin)
    B, _, S, D = q.shape
    if k.dim() != 4 or k.shape[0] != B or k.shape[2] != S or k.shape[3] != D:
        raise ValueError(
            f"{op}: {k_name} must have the shape of {q_name} but for the heads,"
            f" {(B, 'heads', S, D)}, got {tuple(k.shape)}"
        )
    leading_is_right = cos.dim() == 2 or (cos.dim() == 3 and cos.shape[0] in (1, B))
    if not leading_is_right or cos.shape[-2] != S:
        raise ValueError(
            f"{op}: cos must be (S, R), (1, S, R) or (B, S, R) for {q_name}'s S of {S} and B of"
            f" {B}, got shape {tuple(cos.shape)}"
        )
    R = cos.shape[-1]
    if not 2 <= R <= D or R % 2 != 0:
        raise ValueError(
            f"{op}: cos must have an even number of columns from 2 to {q_name}'s D of {D}, got {R}"
        )
    checks.shape(op, "sin", sin, cos.shape, "cos")
