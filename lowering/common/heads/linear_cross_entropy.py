"""linear_cross_entropy on a device: PyTorch's matrix products, a chunk of rows at a time, and
between them the row functions of the device's cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .... import library
from ....ops.heads.head import (
    Head,
    both,
    divisor,
    finished_in_forward,
    shaped,
    still_missing,
    upstream_of_tokens,
)
from ....ops.heads.scaling import scales
from ..losses.cross_entropy import given_tokens, tokens_of
from .chunked_head import chunked_tokens, head_tensors


def register(device: str, kernels: Any, scale: Callable[..., None], alignment: int) -> None:
    """Register the ops with the row functions of the module `kernels`.

    `scale` is the device's own: see `scaling`. Each row of logits starts at a multiple of
    `alignment` elements.
    """
    scales[device] = scale
    module = kernels.__name__

    # allocates=True, so that the output of a gradient is not in memory beside its wider sum.
    @library.kernel("linear_cross_entropy_forward", device, allocates=True, module=module)
    def linear_cross_entropy_forward(call):
        return _forward(call, kernels, alignment)

    @library.kernel("linear_cross_entropy_backward", device, allocates=True, module=module)
    def linear_cross_entropy_backward(call):
        return _backward(call, kernels, scale, alignment)


def _forward(call: Any, kernels: Any, alignment: int) -> tuple[Tensor | None, ...]:
    allocated = library.allocate("linear_cross_entropy_forward", call)
    outputs, computed = allocated[:-5], allocated[-5:]
    del allocated
    tokens = tokens_of(call, call.class_weight, *outputs)
    tensors, bounds = head_tensors(call), (call.accum_dtype, call.chunk_bytes)
    head = chunked_tokens(Head.of(*tensors), computed[1], alignment, *bounds)
    gradients = head.gradients(computed)
    del computed
    for chunk, chunk_head, logits in head.logits():
        kernels.loss_and_gradient(call, logits, tokens.chunk(chunk), any(call.gradient_mask))
        gradients.add(chunk_head, logits)
    del logits
    loss, z_loss, _, _, total_weight, *_ = outputs
    kernels.reduce(call, call.weight.shape[0], tokens, loss, z_loss, total_weight)
    return (*outputs, *shaped(gradients.results(), tensors))


def _backward(
    call: Any, kernels: Any, scale: Callable[..., None], alignment: int
) -> tuple[Tensor | None, ...]:
    results = library.allocate("linear_cross_entropy_backward", call)
    computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
    items = divisor(call.reduction, call.total_weight, call.num_items_in_batch)
    finished = finished_in_forward(
        call.dloss, computed, call.output_mask, call.target, call.ignore_index, items,
        call.x.dtype, results, scale,
    )  # fmt: skip
    if not any(still_missing(call.output_mask, finished)):
        return tuple(finished)
    tokens = given_tokens(call, call.class_weight)
    upstream = upstream_of_tokens(
        call.dloss, call.dz_loss, call.dlse, call.dtarget_logit,
        call.lse, call.reduction, call.total_weight, call.num_items_in_batch,
    )  # fmt: skip
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    tensors, bounds = head_tensors(call), (call.accum_dtype, call.chunk_bytes)
    head = chunked_tokens(Head.of(*tensors), unfinished[1], alignment, *bounds)
    gradients = head.gradients(unfinished)
    del results, unfinished
    for chunk, chunk_head, logits in head.logits():
        grads = [None if grad is None else grad[chunk] for grad in (*upstream, None)]
        kernels.gradient(call, grads, logits, tokens.chunk(chunk), logits)
        gradients.add(chunk_head, logits)
    del logits
    return both(finished, shaped(gradients.results(), tensors))
