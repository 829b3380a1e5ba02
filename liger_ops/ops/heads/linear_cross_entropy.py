"""Cross-entropy of the logits of a linear layer, which are computed in chunks and not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import ABOVE_0
from ..losses.cross_entropy import OPTIONS, RESULTS
from .gradients import gradients_of_definition
from .head import (
    GRADIENTS,
    Head,
    cast_as_linear,
    divisor,
    finished_in_forward,
    first_given,
    needed_gradients,
    shaped,
    still_missing,
)
from .lora import lora_input
from .precomputed_gradient import PrecomputedFormula, gradients_are_private

_LOSS, _GRADIENT = library.OPS["cross_entropy_forward"], library.OPS["cross_entropy_backward"]


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
    """Compute the cross-entropy of the logits x @ weight.T + bias, in chunks that are not kept.

        logits = x @ weight.T + bias
        loss = cross_entropy(logits, target, class_weight, token_weight, ...)

    with the equations and options of `cross_entropy`. The logits of one chunk of x's rows at a time
    are computed in x's dtype, as by `torch.nn.functional.linear`, and the loss from them in
    float32.

    If a gradient is needed and the reduction is "mean" or "sum", the forward computes it: the
    gradient of a chunk's logits overwrites them, and its products with weight and x are those of an
    ordinary backward. Forward and backward together take three products of M tokens, V classes and
    D columns, as without this op. The backward then multiplies the gradients by the loss's own
    gradient and the reduction's factor. It multiplies the weight's gradient in place: a second
    backward, with `retain_graph=True`, computes that gradient again. A gradient that is not
    required is neither computed nor allocated; under `torch.no_grad()` none is. For the reduction
    "none", and for a second derivative, the backward recomputes the logits, a chunk at a time,
    which makes four products.

    The gradient of weight is summed over the chunks in accum_dtype, float32 by default, and the sum
    is rounded to weight's dtype. For float16 it stays in float32 until it is multiplied, so that
    neither the loss's scale nor the number of tokens makes it overflow or vanish. On a device whose
    matrix products cannot return float32 for bfloat16 (Ascend NPUs), each chunk's product is
    rounded to bfloat16 before it is added. If one chunk has all rows and accum_dtype is None, a
    bfloat16 gradient is one product, rounded as PyTorch's products are, without a sum.

    Memory, beside the result and the gradients: one chunk of logits, of at most chunk_bytes or one
    row, and the accum_dtype sum of weight's gradient. The definition, which runs on a CPU and for
    float64, holds several float32 copies of the chunk. The number of chunks changes only the
    rounding of the result.

    With lora_a and lora_b, the logits are x @ (weight + lora_scale * lora_b @ lora_a).T + bias. The
    sum of the weights is never formed: lora_x = lora_scale * x @ lora_a.T has R columns, and a
    second product, lora_x @ lora_b.T, is added to a chunk of logits, which is rounded to x's dtype
    before and after. x is cast to lora_a's dtype for lora_x. If that is wider than x's, lora_x and
    lora_b are each split into a rounded number of x's dtype and the rounded rest, and the product
    has 3R columns. lora_a, lora_b and x have gradients, and a frozen weight has none; the gradient
    of lora_b is summed over the chunks as that of weight is. If dropout comes before lora_a, or
    several LoRAs are added, give lora_x and lora_b to `linear_cross_entropy_forward`; several are
    concatenated along R.

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
            bytes, the memory that rounding the gradient of weight takes after the last chunk. All
            rows are one chunk if that takes no more memory than several chunks and their sum.
        lora_a: (R, D), floating point: with lora_b, a LoRA that is added to weight.
        lora_b: (V, R), floating point. Both, or neither.
        lora_scale: the factor of lora_b @ lora_a.

    Returns:
        (), or target's shape for the reduction "none"; float32, or float64 if x is.

    Raises:
        TypeError: x, class_weight, token_weight, lora_a or lora_b is not floating point, weight or
            bias does not have x's dtype, target is not int64 or int32, or num_items_in_batch is
            bool or complex.
        ValueError: the shapes do not fit together, or weight has no classes; one of lora_a and
            lora_b is given without the other; the devices differ; an option is outside its range;
            num_items_in_batch is given with another reduction than "mean"; accum_dtype is neither
            float32 nor weight's dtype; or class_weight, token_weight or num_items_in_batch requires
            a gradient.
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
    mask = needed_gradients((x, weight, bias, lora_x, lora_b), reduction)
    with gradients_are_private():
        return linear_cross_entropy_forward(
            x, weight, target, bias, class_weight, token_weight, num_items_in_batch,
            ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale,
            accum_dtype, chunk_bytes, gradient_mask=mask, lora_x=lora_x, lora_b=lora_b,
        )[0]  # fmt: skip


@library.forward(
    "... -lora_a -lora_scale return_predicted return_entropy gradient_mask lora_x lora_b",
    returns=f"{RESULTS} {GRADIENTS}",
    axes="x=* D, weight=V D: x, target=*: int, bias=V: x, class_weight=V, token_weight=*, "
    "num_items_in_batch=: number, lora_x=* R: x, lora_b=V R: x -> loss=[*], z_loss=[*], lse=*, "
    "target_logit=*, total_weight=, predicted_tokens=*: int64, entropy=*, lse_error=*, "
    "dx=* D, dweight=V D, dbias=V, dlora_x=* R, dlora_b=V R",
    dtype="float32+x",
    options={**OPTIONS, "chunk_bytes": ABOVE_0},
)
def linear_cross_entropy_forward(
    call: Any,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor,
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
]:  # fmt: skip
    """Compute `linear_cross_entropy`, and return its intermediate results and gradients too.

    loss, z_loss, lse and target_logit are each differentiable in x, weight, bias, lora_x and
    lora_b; the other results are not. lse, lse_error and target_logit suffice to compute a loss
    over a vocabulary that is split over devices: each device ignores the targets that it does not
    hold.

    The gradients that gradient_mask asks for are those of the sum of the tokens' losses, in x's
    dtype; for float16 in float32, and the gradients of weight and lora_b in accum_dtype. The
    backward uses them if loss is the only result with a gradient, and otherwise recomputes the
    logits. Autocast changes nothing here.

    Args:
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
    gradients = gradients_of_definition(
        call.weight, call.gradient_mask, call.accum_dtype, in_forward=True
    )
    parts = []
    for chunk, chunk_head, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        of_chunk = _of_chunk(_LOSS, call, chunk, logits)
        part = _LOSS.definition(*of_chunk)
        parts.append(part)
        if any(call.gradient_mask):
            with torch.no_grad():
                _, _, lse, _, total_weight, _, _, lse_error = part
                saved = {"lse": lse, "lse_error": lse_error, "total_weight": total_weight}
                saved = _of_chunk(
                    _GRADIENT, call, chunk, logits, dloss=torch.ones_like(lse), **saved
                )
                gradients.add(chunk_head, _GRADIENT.definition(*saved))
    loss, z_loss, lse, target_logit, total_weights, *others = (
        _joined(values) for values in zip(*parts, strict=True)
    )
    total_weight = total_weights.sum()
    shape = call.target.shape
    if call.reduction == "none":
        loss, z_loss = loss.reshape(shape), z_loss.reshape(shape)
    else:
        items = divisor(call, total_weight)
        loss, z_loss = loss.sum() / items, z_loss.sum() / items
    of_tokens = [None if values is None else values.reshape(shape) for values in others]
    return (
        loss, z_loss, lse.reshape(shape), target_logit.reshape(shape), total_weight, *of_tokens,
        *shaped(gradients.results(), call),
    )  # fmt: skip


@library.backward(
    "linear_cross_entropy_forward",
    "dloss? dz_loss? dlse? dtarget_logit? x weight target bias class_weight token_weight"
    " num_items_in_batch lse lse_error total_weight dx? dweight? dbias? ... output_mask"
    " lora_x= lora_b= dlora_x= dlora_b= -> dx dweight dbias dlora_x dlora_b",
    returns=GRADIENTS,
    formula=PrecomputedFormula,
)
def linear_cross_entropy_backward(call: Any) -> Any:
    """Compute the gradient of `linear_cross_entropy_forward`.

    A gradient that the forward computed, and that is an argument here, is multiplied by dloss and
    the reduction's factor, in float32, and rounded once. The others are computed from recomputed
    logits, a chunk of rows at a time, with dlogits from `cross_entropy_backward` in x's dtype:

        dx = dlogits @ weight
        dweight = sum over the chunks of dlogits.T @ x
        dbias = sum(dlogits, 0)
        dlora_x = dlogits @ lora_b
        dlora_b = sum over the chunks of dlogits.T @ lora_x
    """
    finished = finished_in_forward(call, divisor(call, call.total_weight))
    missing = still_missing(call.output_mask, finished)
    if not any(missing):
        return tuple(finished)
    names = ("dloss", "dz_loss", "dlse", "dtarget_logit")
    upstream = dict(zip(names, upstream_of_tokens(call), strict=True))
    statistics = {"lse": call.lse.reshape(-1), "lse_error": call.lse_error.reshape(-1)}
    gradients = gradients_of_definition(call.weight, missing, call.accum_dtype)
    for chunk, chunk_head, logits in Head.of_call(call).chunks_of_tokens(call.chunk_bytes):
        values = {name: _part(x, chunk) for name, x in (upstream | statistics).items()}
        values["total_weight"] = call.total_weight
        dlogits = _GRADIENT.definition(*_of_chunk(_GRADIENT, call, chunk, logits, **values))
        gradients.add(chunk_head, dlogits)
    return first_given(finished, shaped(gradients.results(), call))


def upstream_of_tokens(call: Any) -> list[Tensor | None]:
    """Return the gradients of each token's own loss, z-loss, lse and target logit."""
    items = divisor(call, call.total_weight)
    reduced = [
        None if g is None else g.to(call.lse.dtype) / items for g in (call.dloss, call.dz_loss)
    ]
    per_token = [
        None if g is None else g.to(call.lse.dtype) for g in (call.dlse, call.dtarget_logit)
    ]
    return [
        None if grad is None else grad.expand(call.lse.shape).reshape(-1)
        for grad in (*reduced, *per_token)
    ]


def _of_chunk(op: Any, call: Any, chunk: slice, logits: Tensor, **values: Any) -> Any:
    """Return the call of `op`, an op of logits, for a chunk of tokens.

    Its reduction is "none": the loss op reduces the tokens of all chunks together.
    """
    names = set(op.arguments._fields) & set(call._fields)
    arguments = dict.fromkeys(op.arguments._fields) | {name: getattr(call, name) for name in names}
    target, token_weight = _part(call.target, chunk), _part(call.token_weight, chunk)
    arguments |= {"logits": logits, "target": target, "token_weight": token_weight}
    arguments |= {"weight": call.class_weight, "num_items_in_batch": None, "reduction": "none"}
    return op.arguments(**arguments | values)


def _joined(values: tuple[Tensor | None, ...]) -> Any:
    """Concatenate one result of the chunks, which is a tensor for all of them or None for all."""
    tensors = [value.reshape(-1) for value in values if value is not None]
    return torch.cat(tensors) if tensors else None


def _part(values: Tensor | None, chunk: slice) -> Tensor | None:
    """Return a chunk's part of the values of all tokens."""
    return None if values is None else values.reshape(-1)[chunk]


library.keep_dtypes_under_autocast("linear_cross_entropy_forward", "linear_cross_entropy_backward")
