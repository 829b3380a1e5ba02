"""multi_token_attention on a device: a kernel computes p from the scores, p is convolved, and in
the backward another kernel computes the gradient of the scores from that of p."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.heads.chunks import chunks
from .causal_convolution import CausalConvolution

# Bytes of p of the samples that the backward takes at a time. 2 x 4 x 8192 x 8192 in bfloat16 take
# as long in chunks of 64 MiB as whole.
CHUNK_BYTES = 256 * 2**20


def register(
    device: str, launch_forward: Callable[..., None], launch_backward: Callable[..., None],
    convolution: type[CausalConvolution] = CausalConvolution,
) -> None:  # fmt: skip
    """Register the kernels of a device: launch_forward(scores, p, sparse) writes p, and
    launch_backward(dp, scores, dscores, sparse) writes dscores, which may be dp. Where the device's
    `convolution` does not take the weight, PyTorch's convolution does."""
    module = launch_forward.__module__

    def convolution_of(call: Any) -> CausalConvolution:
        kernels = convolution.of(call)
        return kernels if kernels.takes(call.weight) else CausalConvolution.of(call)

    # allocates=True, because the convolution allocates the result.
    @library.kernel("multi_token_attention_forward", device, allocates=True, module=module)
    def forward(call):
        y = library.allocate("multi_token_attention_forward", call)
        if call.scores.shape[0] == 0:
            return y
        del y
        p = torch.empty(call.scores.shape, dtype=call.weight.dtype, device=call.scores.device)
        launch_forward(call.scores, p, call.sparse)
        return convolution_of(call).forward(p, call.weight.contiguous(), call.bias)

    # allocates=True, because dscores may be in the memory of dp.
    @library.kernel("multi_token_attention_backward", device, allocates=True, module=module)
    def backward(call):
        outputs = library.allocate("multi_token_attention_backward", call)
        if call.scores.shape[0] == 0:
            return tuple(None if output is None else output.zero_() for output in outputs)
        wanted = [output is not None for output in outputs]
        del outputs
        return _gradients(call, wanted, convolution_of(call), launch_forward, launch_backward)


def _gradients(
    call: Any,
    wanted: list[bool],
    convolution: CausalConvolution,
    launch_forward: Callable[..., None],
    launch_backward: Callable[..., None],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of scores, weight and bias, a chunk of samples at a time. p is computed
    again."""
    weight = call.weight.contiguous()
    dscores = dweight = dbias = None
    samples = list(_chunks_of_samples(call))
    for chunk in samples:
        scores, dc = call.scores[chunk], convolution.masked(call.dy[chunk], weight)
        if wanted[1]:
            p = torch.empty(scores.shape, dtype=weight.dtype, device=scores.device)
            launch_forward(scores, p, call.sparse)
            totals = convolution.gradients_of_weights(dc, p, weight, wanted[2])
            dweight, dbias = _sum(dweight, totals[0]), _sum(dbias, totals[1])
            del p
        elif wanted[2]:
            dbias = _sum(dbias, dc.tril().sum((0, 2, 3), dtype=torch.float32))
        if wanted[0]:
            dp = convolution.gradient_of_input(dc, weight, scores.shape[-1])
            del dc
            # The kernel reads a row of dp before it writes the row: dscores may take dp's memory.
            if len(samples) == 1 and dp.dtype == scores.dtype and dp.is_contiguous():
                dscores = dp
            elif dscores is None:
                dscores = torch.empty_like(call.scores, memory_format=torch.contiguous_format)
            launch_backward(dp, scores, dscores if dscores is dp else dscores[chunk], call.sparse)
    sums = (None if total is None else total.to(weight.dtype) for total in (dweight, dbias))
    return (dscores, *(None if total is None else total.contiguous() for total in sums))


def _sum(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Add a chunk's gradient to the total, in float32; that of a single chunk keeps its dtype."""
    return term if total is None or term is None else total.float() + term


def _chunks_of_samples(call: Any) -> Iterator[slice]:
    """Return the chunks of samples that the backward takes at a time."""
    batch, channels, L, _ = call.scores.shape
    widest = max(channels * L * L, call.dy[0].numel())
    return chunks(batch, widest * call.weight.element_size(), CHUNK_BYTES)
