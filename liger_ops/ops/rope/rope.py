"""Rotary position embedding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import library
from ...derived import gradient_by_autograd
from ..tensors import in_order_of, widened

AXES = "q=b h s D, k=b h' s D: q, cos=?: any, sin=?: any -> q=b h s D, k=b h' s D: q"


def axes_of_call(call: Any, axes: str) -> str:
    """Return the axes line of a call of `rope` or `rms_norm_rope`, or of their backwards.

    It puts the axes of the call's tables in the place of each "?". The tensors of the call are
    DTensor specs, whose dtype is in `tensor_meta`.
    """
    q, k = (call.q, call.k) if hasattr(call, "q") else (call.dq, call.dk)
    if k.shape[1] == 1 != q.shape[1]:
        # With q's heads sharded, a single head of k would be replicated, and the rule would take
        # its result for a part of a sum over the devices. An "H" is not sharded.
        axes = axes.replace("b h", "b H")
    matrix = "" if call.sin is not None or call.cos.tensor_meta.dtype.is_complex else " M M"
    leading = len(call.cos.shape) - len(matrix.split()) - bool(call.sections) - 2
    return axes.replace("?", f"{'T ' if call.sections else ''}{'b ' * leading}s R{matrix}")


@library.define(tags=torch.Tag.needs_exact_strides, axes=AXES, axes_of_call=axes_of_call)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None,
    interleaved: bool = False, per_pair: bool = False, sections: list[int] | None = None,
    deinterleave: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply rotary position embedding to queries and keys.

        y = x * cos + turned(x) * sin

    x is the first R of the D elements of a head; the other elements are copied. turned(x) replaces
    each pair (a, b) of elements by (-b, a). Elements are paired in one of two ways:

    * halves: a is in the first half of the R elements and b in the second (Llama, Mistral, Qwen,
      Gemma, Phi: transformers' `apply_rotary_pos_emb` with `rotate_half`);
    * interleaved: a and b are next to each other (GPT-J, GLM4, Cohere, Flux).

    With `deinterleave` the pairs of q and k are interleaved, and those of the results are in halves
    (DeepSeek: transformers' `apply_rotary_pos_emb_interleave`).

    cos and sin hold a number per element, in the order of the results' elements; the numbers of the
    two elements of a pair are usually equal, but may differ. With `per_pair`, cos and sin hold a
    number per pair (GPT-OSS; the first half of GLM4's tables).

    A complex cos holds cos + i sin for each pair, and sin is None: the `freqs_cis` of Llama 4,
    whose `apply_rotary_emb` multiplies the pairs (a + ib) by it. Pairs are then interleaved and the
    table is per pair, whatever `interleaved` and `per_pair` are.

    A real cos without sin holds a 2 x 2 matrix for each pair, by which (a, b) is multiplied: the
    `freqs_cis` of Flux, [[cos, -sin], [sin, cos]]. All four numbers are read. Here too, pairs are
    interleaved.

    With `sections` there are three tables: for the temporal, the height and the width position. The
    first sections[0] of the R/2 pairs take their numbers from the first table, the next sections[1]
    from the second and the last sections[2] from the third (`mrope_section` of Qwen2-VL). The
    tables are not combined in memory.

    The rotation is computed in float32 and rounded once, to the dtype of q and k.

    Inputs are not made contiguous: the heads of a projection, (B, S, heads, D) viewed as
    (B, heads, S, D), are read without a copy, and the results have the layout of q and k, which
    attention reads without a copy.

    The gradients of q and k are computed by the inverse rotation, with -sin for sin; only cos and
    sin are saved for them. The gradients of cos and sin, for learned frequencies, are computed by
    plain PyTorch and need q and k to be saved. By PyTorch's convention, the gradient of a complex
    cos is the gradient of cos + i times the gradient of sin. Each number of a matrix has its own
    gradient.

    Autocast changes nothing: q and k keep their dtype. float64 and complex128 run the definition on
    every device.

    Args:
        q: (B, H, S, D), floating point, any strides.
        k: (B, H', S, D), of q's dtype, with any number of heads.
        cos, sin: (S, R), (1, S, R) or (B, S, R), with sections (3, 1, S, R) or (3, B, S, R),
            floating point, any strides; R is even and at most D. With per_pair the last dimension
            is R/2. A complex cos is complex64 or complex128, with the shape of a table per pair.
            Matrices are (S, R/2, 2, 2), (1, S, R/2, 2, 2) or (B, S, R/2, 2, 2), without sections.
        interleaved: whether pairs are interleaved, instead of halves.
        per_pair: whether cos and sin have one number for the two elements of a pair.
        sections: three counts of pairs that add up to R/2.
        deinterleave: whether interleaved pairs are written in halves.

    Returns:
        q and k rotated, with their shapes, dtype and layout.

    Raises:
        TypeError: a tensor is not floating point (cos may also be complex64 or complex128), or k
            does not have q's dtype.
        ValueError: q or k does not have four dimensions, or they differ in one other than the
            heads; cos or sin has none of the shapes above; R is odd or above D; sections are not
            three counts that add up to R/2, or are given with matrices; sin is given with a complex
            cos, or is None with a real cos that holds no matrices; deinterleave is True without
            interleaved pairs; or the devices differ.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the
    sections: Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at
    Any Resolution", 2024.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.rope(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
        >>> liger_ops.rope(q, q, torch.tensor([[1j]]))[0]
        tensor([[[[0., 1.]]]])
        >>> liger_ops.rope(q, q, torch.tensor([[[[0.0, -1.0], [1.0, 0.0]]]]))[0]
        tensor([[[[0., 1.]]]])
    """
    tables = (cos, sin, interleaved, per_pair, sections, deinterleave)
    return rotated(q, *tables), rotated(k, *tables)


@library.backward("rope", "dq dk cos sin ... output_mask -> dq dk")
def rope_backward(call: Any) -> Any:
    """Compute the gradient of `rope`.

    dx = dy * cos - turned(dy * sin)
    """
    options = (call.interleaved, call.per_pair, call.sections, call.deinterleave, True)
    tables = (call.cos, call.sin, *options)
    pairs = zip((call.dq, call.dk), call.output_mask, strict=True)
    return tuple(rotated(dy, *tables) if wanted else None for dy, wanted in pairs)


class PairLayout(NamedTuple):
    """The layout of pairs in each tensor of a rotation: True for interleaved, False for halves.

    x is the tensor that is read, and y the tensor that is written. `tables` is for a cos and sin
    with a number per element.
    """

    x: bool
    y: bool
    tables: bool


def pairs_of(
    sin: Tensor | None, interleaved: bool, deinterleave: bool, backward: bool
) -> PairLayout:
    """Return the layout of pairs of a rotation; in the backward x is dy, and y is dx."""
    source = interleaved or sin is None
    result = source and not deinterleave
    return PairLayout(result, source, result) if backward else PairLayout(source, result, result)


def rotated_columns(cos: Tensor, sin: Tensor | None, per_pair: bool) -> int:
    """Return R, for tables of cos and sin, of cos + i sin, or of matrices."""
    if holds_matrices(cos, sin):
        return 2 * cos.shape[-3]
    return cos.shape[-1] * (2 if per_pair or sin is None else 1)


def holds_matrices(cos: Tensor, sin: Tensor | None) -> bool:
    return sin is None and not cos.is_complex()


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor | None,
    interleaved: bool, per_pair: bool, sections: list[int] | None, deinterleave: bool,
    backward: bool = False,
) -> Tensor:  # fmt: skip
    options = (interleaved, per_pair, sections, deinterleave, backward)
    return in_order_of(_rotated(x, cos, sin, *options), x)


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor | None,
    interleaved: bool, per_pair: bool, sections: list[int] | None, deinterleave: bool,
    backward: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate x. The result has any memory layout."""
    wide = widened(x)
    R = rotated_columns(cos, sin, per_pair)
    pairs = pairs_of(sin, interleaved, deinterleave, backward)
    cos_a, cos_b, sin_a, sin_b = (
        _for_all_heads(table, sections).to(wide.dtype)
        for table in _numbers_per_pair(cos, sin, per_pair, pairs.tables)
    )
    if backward:
        # The matrix of a pair, [[cos_a, -sin_a], [sin_b, cos_b]], transposed.
        sin_a, sin_b = -sin_b, -sin_a
    a, b = _split(wide[..., :R], pairs.x)
    y = _joined(a * cos_a - b * sin_a, b * cos_b + a * sin_b, pairs.y)
    # Without further elements there is nothing to concatenate: y is in new memory already.
    return (y if x.shape[-1] == R else torch.cat((y, wide[..., R:]), -1)).to(x.dtype)


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first elements of the pairs, and the second elements."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, -1)
    return a, b


def _joined(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def _numbers_per_pair(
    cos: Tensor, sin: Tensor | None, per_pair: bool, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tables' numbers per pair: cos of the first and second elements, then their sin."""
    if holds_matrices(cos, sin):
        # A matrix is [[cos_a, -sin_a], [sin_b, cos_b]].
        return cos[..., 0, 0], cos[..., 1, 1], -cos[..., 0, 1], cos[..., 1, 0]
    if sin is None:
        cos, sin, per_pair = cos.real, cos.imag, True
    if per_pair:
        return cos, cos, sin, sin
    return *_split(cos, interleaved), *_split(sin, interleaved)


def _for_all_heads(table: Tensor, sections: list[int] | None) -> Tensor:
    """Combine the tables of the sections, and add a dimension for the heads."""
    if sections is not None:
        parts = enumerate(table.split(sections, -1))
        table = torch.cat([part[i] for i, part in parts], -1)
    return table.unsqueeze(-3)


def _rotations(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None,
    interleaved: bool, per_pair: bool, sections: list[int] | None, deinterleave: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # The tables may be DTensors, whose uneven shards have no layout to follow.
    options = (cos, sin, interleaved, per_pair, sections, deinterleave)
    return _rotated(q, *options), _rotated(k, *options)


table_gradients = gradient_by_autograd(_rotations, "dq dk q k cos sin ... output_mask -> dcos dsin")


def _setup_context(ctx: Any, call: Any, output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, *ctx.options = call
    learned = any(table is not None and table.requires_grad for table in (cos, sin))
    ctx.save_for_backward(cos, sin, *((q, k) if learned else ()))


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, *inputs = ctx.saved_tensors
    needs = ctx.needs
    grad_q = grad_k = dcos = dsin = None
    if needs.q or needs.k:
        options = (*ctx.options, [needs.q, needs.k])
        grad_q, grad_k = rope_backward(dq, dk, cos, sin, *options)
    if needs.cos or needs.sin:
        needed = [needs.cos, needs.sin]
        dcos, dsin = table_gradients((dq, dk, *inputs, cos, sin, *ctx.options, needed))
    return grad_q, grad_k, dcos, dsin


library.gradient("rope", _backward, _setup_context)
