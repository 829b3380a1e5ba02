"""linear_cross_entropy on a device: PyTorch's matrix products, a chunk of rows at a time, and
between them the row functions of the device's cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .... import library
from ....ops.heads.gradients import WEIGHT
from ....ops.heads.head import (
    HEAD,
    Head,
    divisor,
    finished_in_forward,
    first_given,
    shaped,
    still_missing,
)
from ....ops.heads.linear_cross_entropy import upstream_of_tokens
from ..losses.cross_entropy import given_tokens, tokens_of
from .chunked_head import Device, chunked_tokens


def forward(device: Device, call: Any) -> tuple[Tensor | None, ...]:
    kernels = device.cross_entropy
    # Each `del` drops references: the output of a gradient is not in memory beside its wider sum.
    allocated = library.allocate("linear_cross_entropy_forward", call)
    outputs, computed = allocated[: -len(HEAD)], allocated[-len(HEAD) :]
    del allocated
    tokens = tokens_of(call, call.class_weight, *outputs)
    bounds = (call.accum_dtype, call.chunk_bytes)
    head = chunked_tokens(Head.of_call(call), computed[WEIGHT], device.alignment, *bounds)
    gradients = head.gradients(computed)
    del computed
    for chunk, chunk_head, logits in head.logits():
        # With a gradient, this writes it over the logits.
        kernels.loss_and_gradient(call, logits, tokens.chunk(chunk), any(call.gradient_mask))
        gradients.add(chunk_head, logits)
    del logits
    loss, z_loss, _, _, total_weight, *_ = outputs
    kernels.reduce(call, call.weight.shape[0], tokens, loss, z_loss, total_weight)
    return (*outputs, *shaped(gradients.results(), call))


def backward(device: Device, call: Any) -> tuple[Tensor | None, ...]:
    results = library.allocate("linear_cross_entropy_backward", call)
    finished = finished_in_forward(call, divisor(call, call.total_weight), results, device.scale)
    if not any(still_missing(call.output_mask, finished)):
        return tuple(finished)
    tokens, upstream = given_tokens(call, call.class_weight), upstream_of_tokens(call)
    unfinished = [a if b is None else None for a, b in zip(results, finished, strict=True)]
    bounds = (call.accum_dtype, call.chunk_bytes)
    head = chunked_tokens(Head.of_call(call), unfinished[WEIGHT], device.alignment, *bounds)
    gradients = head.gradients(unfinished)
    del results, unfinished
    for chunk, chunk_head, logits in head.logits():
        grads = [None if grad is None else grad[chunk] for grad in (*upstream, None)]
        device.cross_entropy.gradient(call, grads, logits, tokens.chunk(chunk), logits)
        gradients.add(chunk_head, logits)
    del logits
    return first_given(finished, shaped(gradients.results(), call))
