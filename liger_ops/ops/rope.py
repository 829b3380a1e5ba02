"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from .precision import widened
from .strides import in_order_of


@library.define(strides=torch.Tag.needs_exact_strides)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None,
    interleaved: bool = False, per_pair: bool = False, sections: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary position embedding of queries and keys.

        y = x * cos + turned(x) * sin

    x is the first R of the D elements of a head; the others are copied. turned(x) replaces each
    pair (a, b) of elements by (-b, a). Elements are paired in one of two ways:

    * halves: a is in the first half of the R elements and b in the second (Llama, Mistral, Qwen,
      Gemma, Phi: transformers' `apply_rotary_pos_emb` with `rotate_half`);
    * interleaved: a and b are next to each other (GPT-J, GLM4, Cohere).

    cos and sin hold a number per element (usually the same for both elements of a pair, but they
    may differ) or, with `per_pair`, per pair (GPT-OSS; the first half of GLM4's tables).

    A complex cos holds cos + i sin for each pair, and sin is None: the `freqs_cis` of Llama 4,
    whose `apply_rotary_emb` multiplies the pairs (a + ib) by it. Pairs are then interleaved and the
    table is per pair, whatever `interleaved` and `per_pair` are.

    With `sections` there are three tables: for the temporal, the height and the width position. The
    first sections[0] of the R/2 pairs take their numbers from the first table, the next sections[1]
    from the second and the last sections[2] from the third (`mrope_section` of Qwen2-VL). The
    tables are not combined in memory.

    The rotation is computed in float32 and rounded once, to the dtype of q and k.

    Inputs are not made contiguous: the heads of a projection, (B, S, heads, D) viewed as
    (B, heads, S, D), are read without a copy, and the results have the layout of q and k, which
    attention reads without a copy.

    The gradients of q and k are the inverse rotation, with -sin for sin; only cos and sin are saved
    for them. The gradients of cos and sin, for learned frequencies, are computed by plain PyTorch
    and need q and k to be saved. By PyTorch's convention, the gradient of a complex cos is the
    gradient of cos + i times the gradient of sin.

    Autocast changes nothing: q and k keep their dtype. float64 and complex128 run the definition on
    every device.

    Args:
        q: (B, heads, S, D), floating point, any strides.
        k: (B, heads of k, S, D), of q's dtype, with any number of heads.
        cos, sin: (S, R), (1, S, R) or (B, S, R), with sections (3, 1, S, R) or (3, B, S, R),
            floating point, any strides; R is even and at most D. With per_pair the last dimension
            is R/2. A complex cos is complex64 or complex128, with the shape of a table per pair.
        interleaved: whether pairs are interleaved, instead of halves.
        per_pair: whether cos and sin have one number for the two elements of a pair.
        sections: three counts of pairs that add up to R/2.

    Returns:
        q and k rotated, with their shapes, dtype and layout.

    Raises:
        TypeError: a tensor is not floating point (cos may be complex), or k does not have q's
            dtype.
        ValueError: a shape, a device or sections is not as above; sin is given with a complex cos,
            or is None with a real cos.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the
    sections: Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at
    Any Resolution", 2024.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.rope(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
        >>> liger_ops.rope(q, q, torch.tensor([[1j]]))[0]
        tensor([[[[0., 1.]]]])
    """
    tables = (cos, sin, interleaved, per_pair, sections)
    return _rotated(q, *tables), _rotated(k, *tables)


@library.define(strides=torch.Tag.needs_exact_strides)
def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor | None,
    interleaved: bool, per_pair: bool, sections: list[int] | None, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of `rope`.

        dx = dy * cos - turned(dy * sin)

    Args:
        dq, dk: the gradients of `rope`'s results, any strides.
        cos, sin, interleaved, per_pair, sections: as given to `rope`.
        output_mask: whether the gradients of q and k are computed and allocated.

    Returns:
        The gradients of q and k, with the layout of dq and dk; each may be None.

    Raises:
        TypeError, ValueError: as `rope`.
    """
    back = [
        _rotated(dy, cos, sin, interleaved, per_pair, sections, backward=True) if wanted else None
        for dy, wanted in zip((dq, dk), output_mask, strict=True)
    ]
    return back[0], back[1]


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor | None,
    interleaved: bool, per_pair: bool, sections: list[int] | None, backward: bool = False,
) -> Tensor:  # fmt: skip
    wide = widened(x)
    if cos.is_complex():
        cos, sin, interleaved, per_pair = cos.real, cos.imag, True, True
    assert sin is not None
    R = rotated_columns(cos, per_pair)
    (cos_a, cos_b), (sin_a, sin_b) = (
        _of_pairs(table.to(wide.dtype), interleaved, per_pair, sections) for table in (cos, sin)
    )
    a, b = _pairs(wide[..., :R], interleaved)
    if backward:
        sin_a, sin_b = -sin_b, -sin_a
    y = _joined(a * cos_a - b * sin_a, b * cos_b + a * sin_b, interleaved)
    return in_order_of(torch.cat((y, wide[..., R:]), -1).to(x.dtype), x)


def rotated_columns(cos: Tensor, per_pair: bool) -> int:
    """R for a table of cos or of cos + i sin."""
    return cos.shape[-1] * (2 if per_pair or cos.is_complex() else 1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first elements of the pairs, and the second ones."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, -1)
    return a, b


def _joined(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def _of_pairs(
    table: Tensor, interleaved: bool, per_pair: bool, sections: list[int] | None
) -> list[Tensor]:
    """A table's numbers for the first and for the second elements of the pairs, for all heads."""
    of_pairs = [table, table] if per_pair else [*_pairs(table, interleaved)]
    if sections is not None:
        of_pairs = [
            torch.cat([part[i] for i, part in enumerate(x.split(sections, -1))], -1)
            for x in of_pairs
        ]
    return [x.unsqueeze(-3) for x in of_pairs]


def _table_gradients(
    grads: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], cos: Tensor,
    interleaved: bool, per_pair: bool, sections: list[int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of cos and sin, with cos's shape: sums over the heads, and over the batch and
    the elements of a pair if these share a number."""
    if cos.is_complex():
        interleaved = per_pair = True
    R = rotated_columns(cos, per_pair)
    sums: list[list[Tensor]] = [[], [], [], []]
    for dy, x in zip(grads, inputs, strict=True):
        dy_a, dy_b = _pairs(widened(dy)[..., :R], interleaved)
        a, b = _pairs(widened(x)[..., :R], interleaved)
        for total, product in zip(sums, (dy_a * a, dy_b * b, -dy_a * b, dy_b * a), strict=True):
            total.append(product.sum(-3))
    cos_a, cos_b, sin_a, sin_b = (_shared(of_q + of_k, cos, sections) for of_q, of_k in sums)
    if per_pair:
        return cos_a + cos_b, sin_a + sin_b
    return _joined(cos_a, cos_b, interleaved), _joined(sin_a, sin_b, interleaved)


def _shared(grad: Tensor, cos: Tensor, sections: list[int] | None) -> Tensor:
    """Reduce the gradient of each (batch, position, pair) to the shape of the tables."""
    if cos.dim() == 2:
        grad = grad.sum(0)
    elif cos.shape[-3] == 1:
        grad = grad.sum(0, keepdim=True)
    if sections is None:
        return grad
    parts = grad.split(sections, -1)
    tables = [
        torch.cat([p if i == table else torch.zeros_like(p) for i, p in enumerate(parts)], -1)
        for table in range(len(sections))
    ]
    return torch.stack(tables)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, ctx.interleaved, ctx.per_pair, ctx.sections = inputs
    learned = any(ctx.needs_input_grad[2:4])
    ctx.save_for_backward(cos, sin, *((q, k) if learned else ()))


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, *inputs = ctx.saved_tensors
    needs_q, needs_k, needs_cos, needs_sin, *_ = ctx.needs
    options = (ctx.interleaved, ctx.per_pair, ctx.sections)
    grad_q = grad_k = dcos = dsin = None
    if needs_q or needs_k:
        grad_q, grad_k = rope_backward(dq, dk, cos, sin, *options, [needs_q, needs_k])
    if needs_cos or needs_sin:
        grads = _table_gradients((dq, dk), inputs, cos, *options)
        if cos.is_complex():
            dcos = torch.complex(*grads).to(cos.dtype)
        else:
            dcos = grads[0].to(cos.dtype) if needs_cos else None
            dsin = grads[1].to(sin.dtype) if needs_sin else None
    return grad_q, grad_k, dcos, dsin, None, None, None


library.gradient("rope", _backward, _setup_context)
