"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from .precision import widened
from .strides import in_order_of


@library.define(
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)",
    strides=torch.Tag.needs_exact_strides,
)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

        y = x * cos + turned(x) * sin

    for x the first R of the D elements of a head; the others are copied. turned(x) is of pairs
    (a, b) of elements, and makes each (-b, a):

    * by halves, a in the first half of the R elements and b in the second (Llama, Mistral, Qwen,
      Gemma, Phi: transformers' `apply_rotary_pos_emb` with `rotate_half`);
    * interleaved, a and b next to each other (GPT-J, GLM4, Cohere).

    cos and sin hold a number for each element: the two of a pair may differ, and usually do not.

    Computed in float32 and rounded once to the dtype of q and k, whatever that of cos and sin.

    Strides are followed, not changed: the heads of a projection, (B, S, heads, D) seen as
    (B, heads, S, D), are read without a copy, and the results have the layout of q and k, in which
    attention reads them without one.

    The gradients of q and k are the rotation back, -sin for sin, and save cos and sin alone. Those
    of cos and sin, for frequencies that are learned, are plain PyTorch, and save q and k.

    Autocast changes nothing: q and k keep their dtype. float64 runs the definition on every device.

    Args:
        q: (B, heads, S, D), floating point, any strides.
        k: (B, heads of k, S, D), of q's dtype; of any number of heads.
        cos, sin: (S, R), (1, S, R) or (B, S, R), floating point; R is even and at most D.
        interleaved: how elements are paired.

    Returns:
        q and k rotated: of their shapes, dtype and layout.

    Raises:
        TypeError: a tensor is not floating point, or k is of another dtype than q.
        ValueError: a shape or a device is not as above.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Example:
        >>> q = torch.tensor([[[[1.0, 0.0]]]])
        >>> liger_ops.rope(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[0., 1.]]]])
    """
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


@library.define(
    "(Tensor dq, Tensor dk, Tensor cos, Tensor sin, bool interleaved, bool[2] output_mask)"
    " -> (Tensor?, Tensor?)",
    strides=torch.Tag.needs_exact_strides,
)
def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of `rope`.

        dx = dy * cos - turned(dy * sin)

    Args:
        dq, dk: the gradients of `rope`'s results, any strides.
        cos, sin, interleaved: as given to `rope`.
        output_mask: whether the gradients of q and k are wanted; no other is computed or allocated.

    Returns:
        The gradients of q and k, with the layout of dq and dk, each or None.

    Raises:
        TypeError, ValueError: as `rope`.
    """
    back = [
        _rotated(dy, cos, sin, interleaved, backward=True) if wanted else None
        for dy, wanted in zip((dq, dk), output_mask, strict=True)
    ]
    return back[0], back[1]


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool = False
) -> Tensor:
    wide = widened(x)
    R = cos.shape[-1]
    cos, sin = (table.to(wide.dtype).unsqueeze(-3) for table in (cos, sin))
    pairs = wide[..., :R]
    if backward:
        y = pairs * cos - _turned(pairs * sin, interleaved)
    else:
        y = pairs * cos + _turned(pairs, interleaved) * sin
    return in_order_of(torch.cat((y, wide[..., R:]), -1).to(x.dtype), x)


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _table_gradients(
    grads: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], cos: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of cos and sin, whose shape is cos's: sums over heads, and over a batch that
    shares them."""
    R = cos.shape[-1]
    dcos, dsin = [], []
    for dy, x in zip(grads, inputs, strict=True):
        dy, x = widened(dy)[..., :R], widened(x)[..., :R]
        dcos.append((dy * x).sum(-3))
        dsin.append((dy * _turned(x, interleaved)).sum(-3))
    tables = (dcos[0] + dcos[1], dsin[0] + dsin[1])
    if cos.dim() == 2:
        return tables[0].sum(0), tables[1].sum(0)
    if cos.shape[0] == 1:
        return tables[0].sum(0, keepdim=True), tables[1].sum(0, keepdim=True)
    return tables


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, ctx.interleaved = inputs
    learned = any(ctx.needs_input_grad[2:4])
    ctx.save_for_backward(cos, sin, *((q, k) if learned else ()))


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, *inputs = ctx.saved_tensors
    needs_q, needs_k, needs_cos, needs_sin, _ = ctx.needs
    grad_q = grad_k = dcos = dsin = None
    if needs_q or needs_k:
        grad_q, grad_k = rope_backward(dq, dk, cos, sin, ctx.interleaved, [needs_q, needs_k])
    if needs_cos or needs_sin:
        dcos, dsin = _table_gradients((dq, dk), inputs, cos, ctx.interleaved)
        dcos = dcos.to(cos.dtype) if needs_cos else None
        dsin = dsin.to(sin.dtype) if needs_sin else None
    return grad_q, grad_k, dcos, dsin, None


library.gradient("rope", _backward, _setup_context)
library.differentiate_definition("rope_backward")
