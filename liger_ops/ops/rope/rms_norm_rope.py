"""Root-mean-square normalisation of the heads of queries and keys, then rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0
from ..norms.rms_norm import CASTING_MODES, scaled
from ..tensors import in_order_of
from .rope import AXES, axes_of_call, rotated, table_gradients


@library.define(
    tags=torch.Tag.needs_exact_strides,
    axes=AXES.replace(" ->", ", q_weight=D, k_weight=D ->"),
    options={"eps": AT_LEAST_0, "casting_mode": CASTING_MODES},
    axes_of_call=axes_of_call,
)
def rms_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None = None,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    interleaved: bool = False, per_pair: bool = False, sections: list[int] | None = None,
    deinterleave: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise each head of queries and keys by RMSNorm, then apply rotary position embedding.

        xhat = x / sqrt(mean(x**2, -1) + eps) * (weight + offset)
        y    = xhat * cos + turned(xhat) * sin

    x is q with q_weight, and k with k_weight. The result is that of

        rope(rms_norm(q, q_weight, ...), rms_norm(k, k_weight, ...), cos, sin, ...)

    in one pass over q and k, where the two ops read and write q and k twice. The norm is over all D
    elements of a head, and the rotation is of the first R of them. The attention of Qwen3 and Gemma
    3 does this between the projections and the scores.

    xhat is rounded as `rms_norm` rounds in the same `casting_mode`, and to the dtype of q and k;
    the rotation is computed in float32 and rounded once. The gradients are the equation's, computed
    in float32 and rounded once: the gradient of xhat is not rounded. Those of the weights are
    summed in float32, in an order that does not change between runs. The backward recomputes
    1 / rms: only the arguments are saved, and xhat is never in memory. The gradients of cos and
    sin, for learned frequencies, are computed by plain PyTorch, from xhat, which is computed again.

    Inputs are not made contiguous, unless the elements of a head are not next to each other: q and
    k may be views of one packed projection, (B, S, heads, D) transposed to (B, heads, S, D). The
    results and the gradients of q and k have the order of dimensions in memory that q and k have.

    Heads that are too wide for one program are computed by the kernels of `rms_norm` and `rope`,
    one after the other: on a GPU those of more than 2048 elements, or 1024 in float32.

    Under autocast on a device, inputs are cast to float32, as in `rms_norm`. float64 and complex128
    run the definition on every device.

    Args:
        q: (B, H, S, D), floating point, any strides.
        k: (B, H', S, D), of q's dtype, with any number of heads.
        cos, sin: as in `rope`; each kind of tables is accepted.
        q_weight, k_weight: (D,), floating point; the dtypes may differ from q's. None for no
            scaling.
        eps: added to the mean square.
        offset: added to both weights: 1.0 for models that store weight - 1 (Gemma). It must be 0 if
            a weight is None.
        casting_mode: "llama", "gemma" or "none", as in `rms_norm`.
        interleaved, per_pair, sections, deinterleave: as in `rope`.

    Returns:
        q and k normalised and rotated, with their shapes, dtype and layout.

    Raises:
        TypeError, ValueError: as `rms_norm` and `rope`.

    Source: Henry et al., "Query-Key Normalization for Transformers", 2020; the norm: Dehghani et
    al., "Scaling Vision Transformers to 22 Billion Parameters", 2023.

    Example:
        >>> q = torch.tensor([[[[3.0, 4.0]]]])
        >>> liger_ops.rms_norm_rope(q, q, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[[-1.1314,  0.8485]]]])
    """
    norm = (eps, offset, casting_mode)
    tables = (cos, sin, interleaved, per_pair, sections, deinterleave)
    q_out, k_out = (
        in_order_of(rotated(scaled(x, weight, *norm).to(x.dtype), *tables), x)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q_out, k_out


rms_norm_rope_backward = library.derive_backward(
    "rms_norm_rope",
    "dq dk q k cos sin q_weight k_weight eps offset interleaved per_pair sections deinterleave"
    " output_mask -> dq dk dq_weight dk_weight",
    returns="dq dk dq_weight dk_weight",
    layout=in_order_of,
)


def _setup_context(ctx: Any, call: Any, output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, q_weight, k_weight, *ctx.options = call
    ctx.save_for_backward(q, k, cos, sin, q_weight, k_weight)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    q, k, cos, sin, q_weight, k_weight = ctx.saved_tensors
    eps, offset, casting_mode, *rotation = ctx.options
    needs = ctx.needs
    grad_q = grad_k = dq_weight = dk_weight = dcos = dsin = None
    mask = [needs.q, needs.k, needs.q_weight, needs.k_weight]
    if any(mask):
        arguments = (q, k, cos, sin, q_weight, k_weight, eps, offset, *rotation, mask)
        grad_q, grad_k, dq_weight, dk_weight = rms_norm_rope_backward(dq, dk, *arguments)
    if needs.cos or needs.sin:
        norm = (eps, offset, casting_mode)
        xhat = scaled(q, q_weight, *norm).to(q.dtype), scaled(k, k_weight, *norm).to(k.dtype)
        needed = [needs.cos, needs.sin]
        dcos, dsin = table_gradients((dq, dk, *xhat, cos, sin, *rotation, needed))
    return grad_q, grad_k, dcos, dsin, dq_weight, dk_weight


library.gradient("rms_norm_rope", _backward, _setup_context)
library.autocast("rms_norm_rope", torch.float32)
