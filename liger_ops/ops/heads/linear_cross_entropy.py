"""Cross-entropy of a linear layer's logits, which are computed in chunks and not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0
from ...torch_private import are_functorch_transforms_active
from ..losses.cross_entropy import OPTIONS, RESULTS
from .gradients import gradients_of_definition
from .head import (
    Head,
    both,
    cast_as_linear,
    divisor,
    factors_of,
    finished_in_forward,
    needed_gradients,
    shaped,
    still_missing,
    upstream_of_tokens,
)
from .lora import lora_input
from .precomputed_gradient import PrecomputedFormula, gradients_are_private


@library.compose
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    class_weight: Tensor | None = None, token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits x @ weight.T + bias, computed in chunks and not kept.

        logits = x @ weight.T + bias
        loss = cross_entropy(logits, target, class_weight, token_weight, ...)

    with the equations and options of `cross_entropy`. The logits of one chunk of x's rows at a time
    are computed in x's dtype, as by `torch.nn.functional.linear`, and the loss from them in
    float32.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes it: the
    gradient of a chunk's logits overwrites them, and its products with weight and x are those of an
    ordinary backward. Forward and backward together take three products of M, V and D, as without
    this op. The backward then multiplies by the loss's own gradient and the reduction's factor, the
    weight's in place: a second backward, with `retain_graph=True`, computes it again. A gradient
    that is not required is neither computed nor allocated; under `torch.no_grad()` none is. For the
    reduction "none", and for a second derivative, the backward recomputes the logits, a chunk at a
    time, which makes four products.

    The gradient of weight is summed over the chunks in accum_dtype, float32 by default, and the sum
    is rounded to weight's dtype. For float16 it stays in float32 until it is multiplied, so that
    neither the loss's scale nor the number of tokens makes it overflow or vanish. On a device whose
    matrix products cannot return float32 for bfloat16 (Ascend NPUs), each chunk's product is
    rounded to bfloat16 before it is added. If one chunk has all rows and accum_dtype is None, a
    bfloat16 gradient is one product, rounded as PyTorch's are, and there is no sum.

    Memory, beside the result and the gradients: one chunk of logits, of at most chunk_bytes or one
    row, and the accum_dtype sum of weight's gradient. The definition, which runs on a CPU and for
    float64, holds several float32 copies of the chunk. The number of chunks changes only the
    rounding of the result.

    With lora_a and lora_b, the logits are x @ (weight + lora_scale * lora_b @ lora_a).T + bias. The
    sum of the weights is never formed: lora_x = lora_scale * x @ lora_a.T has R columns, and a
    second product, lora_x @ lora_b.T, is added to a chunk of logits, which is rounded to x's dtype
    before and after. x is cast to lora_a's dtype for lora_x, then lora_x and lora_b to x's. lora_a,
    lora_b and x have gradients, and a frozen weight has none; the gradient of lora_b is summed over
    the chunks as that of weight is. Where dropout comes before lora_a, or several LoRAs are added,
    give lora_x and lora_b to `linear_cross_entropy_forward`, those of several side by side.

    Under autocast x, weight, bias, lora_a and lora_b are cast as `torch.nn.functional.linear` casts
    them.

    This op calls `linear_cross_entropy_forward`, which returns more.

    Args:
        x: (..., D), floating point, any strides.
        weight: (V, D), of x's dtype.
        target: (...), int64 or int32; each is ignore_index, or from 0 to V - 1.
        bias: (V,), of x's dtype.
        class_weight: (V,), floating point; the weight of each class, `cross_entropy`'s weight.
        token_weight, num_items_in_batch, ignore_index, reduction, label_smoothing,
            lse_square_scale, softcap, logit_scale: as for `cross_entropy`.
        accum_dtype: float32, weight's dtype to halve the memory of the sum of its gradient, or None
            for float32.
        chunk_bytes: the size of a chunk of logits in x's dtype. None takes LIGER_OPS_LOGITS_BYTES
            from the environment. If that is not set, the size is the larger of 512 MiB and weight's
            bytes, which rounding the gradient of weight takes after the last chunk, and all rows
            are one chunk if that takes no more memory than several chunks and their sum.
        lora_a: (R, D), floating point: with lora_b, a LoRA that is added to weight.
        lora_b: (V, R), floating point. Both, or neither.
        lora_scale: the factor of lora_b @ lora_a.

    Returns:
        (), or target's shape for the reduction "none"; float32, or float64 if x is.

    Raises:
        TypeError: a tensor has another dtype; weight or bias does not have x's.
        ValueError: a shape, a device or an option is not as above, or a tensor that has no gradient
            requires one.
        IndexError: a target is out of range, on a CPU; other devices do as in `cross_entropy`.

    Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024 (gradient in
    the forward); Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    Example:
        >>> x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_cross_entropy(x, weight, torch.tensor([3, -100]))
        tensor(1.3863)
    """
    x, weight, bias = cast_as_linear(x, weight, bias)
    lora_x, lora_b = lora_input("linear_cross_entropy", x, weight, lora_a, lora_b, lora_scale)
    mask = needed_gradients(x, weight, bias, reduction, lora_x, lora_b)
    if are_functorch_transforms_active():
        # Transforms differentiate the definition, and would not use the forward's gradients.
        mask = [False] * 5
    with gradients_are_private():
        return linear_cross_entropy_forward(
            x, weight, target, bias, class_weight, token_weight, num_items_in_batch,
            ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale,
            accum_dtype, chunk_bytes, gradient_mask=mask, lora_x=lora_x, lora_b=lora_b,
        )[0]  # fmt: skip


@library.define(
    returns=f"{RESULTS} dx dweight dbias dlora_x dlora_b",
    axes="x=* D, weight=V D: x, target=*: int, bias=V: x, class_weight=V, token_weight=*, "
    "num_items_in_batch=: number, lora_x=* R: x, lora_b=V R: x -> loss=[*], z_loss=[*], lse=*, "
    "target_logit=*, total_weight=, predicted_tokens=*: int64, entropy=*, lse_error=*, "
    "dx=* D, dweight=V D, dbias=V, dlora_x=* R, dlora_b=V R",
    dtype="float32+x",
    options={**OPTIONS, "chunk_bytes": ABOVE_0},
)
def linear_cross_entropy_forward(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    class_weight: Tensor | None = None, token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    accum_dtype: torch.dtype | None = None, chunk_bytes: int | None = None,
    return_predicted: bool = False, return_entropy: bool = False,
    gradient_mask: tuple[bool, ...] | list[bool] = (False, False, False, False, False),
    lora_x: Tensor | None = None, lora_b: Tensor | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """`linear_cross_entropy` with its intermediate results and the gradients it computes.

    loss, z_loss, lse and target_logit are each differentiable in x, weight, bias, lora_x and
    lora_b; the other results are not. lse, lse_error and target_logit suffice to compute a loss
    over a vocabulary that is split over devices: each device ignores the targets that it does not
    hold.

    The gradients that gradient_mask asks for are those of the sum of the tokens' losses, in x's
    dtype; for float16 in float32, and the gradients of weight and lora_b in accum_dtype. The
    backward uses them if loss is the only result with a gradient, and otherwise recomputes the
    logits. Autocast changes nothing here.

    Args:
        x, weight, target, bias, class_weight, token_weight, num_items_in_batch, ignore_index,
            reduction, label_smoothing, lse_square_scale, softcap, logit_scale, accum_dtype,
            chunk_bytes: as for `linear_cross_entropy`.
        return_predicted: whether to compute predicted_tokens.
        return_entropy: whether to compute entropy.
        gradient_mask: whether to compute dx, dweight, dbias, dlora_x and dlora_b. All False for the
            reduction "none".
        lora_x: (..., R), of x's dtype, whose product with lora_b is added to the logits.
        lora_b: (V, R), of x's dtype. Both, or neither.

    Returns:
        loss, z_loss, lse, target_logit, total_weight, predicted_tokens, entropy, lse_error: the
            results of `cross_entropy_forward`.
        dx, dweight, dbias, dlora_x, dlora_b: contiguous, of the shapes of x, weight, bias, lora_x
            and lora_b; each is None unless gradient_mask asks for it.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`; or gradient_mask asks for a
            gradient with the reduction "none", or for the gradient of a tensor that is None.

    Example:
        >>> x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> liger_ops.linear_cross_entropy_forward(x, weight, torch.tensor([3]))[2]  # lse
        tensor([1.3863])
    """
    targets, token_weights = target.reshape(-1), _flat(token_weight)
    options = (ignore_index, "none", label_smoothing, lse_square_scale, softcap, logit_scale)
    gradients = gradients_of_definition(weight, gradient_mask, accum_dtype, in_forward=True)
    parts = []
    head = Head.of(x, weight, bias, lora_x, lora_b)
    for chunk, chunk_head, logits in head.chunks_of_tokens(chunk_bytes):
        tokens = (targets[chunk], class_weight, _of(token_weights, chunk), None)
        part = _LOSS(logits, *tokens, *options, return_predicted, return_entropy)
        parts.append(part)
        if any(gradient_mask):
            with torch.no_grad():
                _, _, lse, _, total_weight, _, _, lse_error = part
                ones = torch.ones_like(lse)
                upstream = (ones, None, None, None)
                statistics = (lse, lse_error, total_weight)
                dlogits = _GRADIENT(*upstream, logits, *tokens, *statistics, *options)
                gradients.add(chunk_head, dlogits)
    loss, z_loss, lse, target_logit, total_weights, predicted_tokens, entropy, lse_error = (
        _joined(values) for values in zip(*parts, strict=True)
    )
    total_weight = total_weights.sum()
    if reduction == "none":
        loss, z_loss = loss.reshape(target.shape), z_loss.reshape(target.shape)
    else:
        items = divisor(reduction, total_weight, num_items_in_batch)
        loss, z_loss = loss.sum() / items, z_loss.sum() / items
    return (
        loss,
        z_loss,
        lse.reshape(target.shape),
        target_logit.reshape(target.shape),
        total_weight,
        predicted_tokens.reshape(target.shape) if return_predicted else None,
        entropy.reshape(target.shape) if return_entropy else None,
        lse_error.reshape(target.shape),
        *shaped(gradients.results(), (x, weight, bias, lora_x, lora_b)),
    )


@library.define(returns="dx dweight dbias dlora_x dlora_b")
def linear_cross_entropy_backward(
    dloss: Tensor | None, dz_loss: Tensor | None, dlse: Tensor | None, dtarget_logit: Tensor | None,
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weight: Tensor | None, num_items_in_batch: Tensor | None, lse: Tensor, lse_error: Tensor,
    total_weight: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float,
    lse_square_scale: float, softcap: float | None, logit_scale: float,
    accum_dtype: torch.dtype | None, chunk_bytes: int | None, output_mask: list[bool],
    lora_x: Tensor | None = None, lora_b: Tensor | None = None,
    dlora_x: Tensor | None = None, dlora_b: Tensor | None = None,
) -> tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """The gradient of `linear_cross_entropy_forward`.

    A gradient that the forward computed and that is given here is multiplied by dloss and the
    reduction's factor, in float32, and rounded once. The others are computed from recomputed
    logits, a chunk of rows at a time, with dlogits from `cross_entropy_backward` in x's dtype:

        dx = dlogits @ weight
        dweight = sum over the chunks of dlogits.T @ x
        dbias = sum(dlogits, 0)
        dlora_x = dlogits @ lora_b
        dlora_b = sum over the chunks of dlogits.T @ lora_x

    Args:
        dloss, dz_loss, dlse, dtarget_logit: the gradients of the forward's results, floating point,
            of the shapes of these results, any strides; each may be None.
        lse, lse_error, total_weight: results of the forward.
        dx, dweight, dbias, dlora_x, dlora_b: results of the forward, or None: for the reduction
            "none", and if another result than loss has a gradient.
        output_mask: whether dx, dweight, dbias, dlora_x and dlora_b are computed and allocated.
        The others: as given to the forward.

    Returns:
        dx, dweight, dbias, dlora_x and dlora_b, contiguous, of the shape and dtype of x, weight,
        bias, lora_x and lora_b; or None.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`; or output_mask asks for the gradient of a
            tensor that is None.
    """
    computed = (dx, dweight, dbias, dlora_x, dlora_b)
    items = divisor(reduction, total_weight, num_items_in_batch)
    finished = finished_in_forward(
        dloss, computed, output_mask, target, ignore_index, items, x.dtype
    )
    missing = still_missing(output_mask, finished)
    if not any(missing):
        return tuple(finished)  # type: ignore[return-value]
    targets, token_weights = target.reshape(-1), _flat(token_weight)
    options = (ignore_index, "none", label_smoothing, lse_square_scale, softcap, logit_scale)
    upstream = upstream_of_tokens(
        dloss, dz_loss, dlse, dtarget_logit, lse, reduction, total_weight, num_items_in_batch
    )
    lse, lse_error = lse.reshape(-1), lse_error.reshape(-1)
    gradients = gradients_of_definition(weight, missing, accum_dtype)
    head = Head.of(x, weight, bias, lora_x, lora_b)
    for chunk, chunk_head, logits in head.chunks_of_tokens(chunk_bytes):
        tokens = (targets[chunk], class_weight, _of(token_weights, chunk), None)
        grads = [_of(grad, chunk) for grad in upstream]
        statistics = (lse[chunk], lse_error[chunk], total_weight)
        dlogits = _GRADIENT(*grads, logits, *tokens, *statistics, *options)
        gradients.add(chunk_head, dlogits)
    made = shaped(gradients.results(), (x, weight, bias, lora_x, lora_b))
    return both(finished, made)  # type: ignore[return-value]


_LOSS = library.OPS["cross_entropy_forward"].definition
_GRADIENT = library.OPS["cross_entropy_backward"].definition


def _joined(values: tuple[Tensor | None, ...]) -> Any:
    """Concatenate one result of the chunks, which is a tensor for all of them or None for all."""
    given = [value.reshape(-1) for value in values if value is not None]
    return torch.cat(given) if given else None


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.reshape(-1)


def _of(values: Tensor | None, chunk: slice) -> Tensor | None:
    return None if values is None else values[chunk]


class _Formula(PrecomputedFormula):
    def factor(self, call: Any) -> Tensor:
        items = divisor(call.reduction, call.total_weight, call.num_items_in_batch)
        return factors_of(call.dloss, call.target, call.ignore_index, items)[1]


library.gradient("linear_cross_entropy_forward", formula=_Formula)
library.keep_dtypes_under_autocast("linear_cross_entropy_forward")
library.keep_dtypes_under_autocast("linear_cross_entropy_backward")
