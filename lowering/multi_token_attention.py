"""multi_token_attention on a device: PyTorch's convolution, between kernels of the device and
PyTorch's tril.

tril reads nothing where j > i and, in place, writes nothing but the zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..ops.chunks import chunks
from ..ops.multi_token_attention import Convolution

# p of the samples that the backward takes at a time, not timed.
PART_BYTES = 256 * 2**20


def register(
    device: str, launch_forward: Callable[..., None], launch_backward: Callable[..., None]
) -> None:
    """Register the kernels of a device: launch_forward(scores, p, sparse) writes p, and
    launch_backward(dp, scores, dscores, sparse) writes dscores, which may be dp."""
    module = launch_forward.__module__

    # allocates=True, because the convolution allocates the result.
    @library.kernel("multi_token_attention_forward", device, allocates=True, module=module)
    def forward(call):
        y = library.allocate("multi_token_attention_forward", call)
        if call.scores.shape[0] == 0:
            return y
        del y
        p = torch.empty(call.scores.shape, dtype=call.weight.dtype, device=call.scores.device)
        launch_forward(call.scores, p, call.sparse)
        y = _convolution(call)(p, call.weight.contiguous(), call.bias)
        return y.contiguous().tril_()

    # allocates=True, because the gradient of scores may be in the memory of that of p.
    @library.kernel("multi_token_attention_backward", device, allocates=True, module=module)
    def backward(call):
        outputs = library.allocate("multi_token_attention_backward", call)
        if call.scores.shape[0] == 0:
            return tuple(None if output is None else output.zero_() for output in outputs)
        wanted = [output is not None for output in outputs]
        del outputs
        return _gradients(call, wanted, launch_forward, launch_backward)


def _gradients(
    call: Any,
    wanted: list[bool],
    launch_forward: Callable[..., None],
    launch_backward: Callable[..., None],
) -> tuple[Tensor | None, ...]:
    convolution, weight = _convolution(call), call.weight.contiguous()
    dscores = dweight = dbias = None
    parts = list(_parts(call))
    for part in parts:
        scores, dc = call.scores[part], call.dy[part].to(weight.dtype).tril()
        if wanted[2]:
            dbias = _sum(dbias, dc.sum((0, 2, 3), dtype=torch.float32))
        if wanted[1]:
            p = torch.empty(scores.shape, dtype=weight.dtype, device=scores.device)
            launch_forward(scores, p, call.sparse)
            dweight = _sum(dweight, convolution.gradients(dc, p, weight, [False, True, False])[1])
            del p
        if wanted[0]:
            # As in torch.nn.grad.conv2d_input: of the convolution's input, only the shape is used.
            form = dc.new_empty(1).expand(scores.shape)
            dp = convolution.gradients(dc, form, weight, [True, False, False])[0]
            del dc
            if len(parts) == 1 and dp.dtype == scores.dtype and dp.is_contiguous():
                dscores = dp
            elif dscores is None:
                dscores = torch.empty_like(call.scores, memory_format=torch.contiguous_format)
            launch_backward(dp, scores, dscores if dscores is dp else dscores[part], call.sparse)
    sums = (None if total is None else total.to(weight.dtype) for total in (dweight, dbias))
    return (dscores, *(None if total is None else total.contiguous() for total in sums))


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum over parts, in float32; a single part is left as it is."""
    return part if total is None else total.float() + part


def _parts(call: Any) -> Iterator[slice]:
    """The samples that are taken at a time."""
    batch, channels, L, _ = call.scores.shape
    widest = max(channels * L * L, call.dy[0].numel())
    return chunks(batch, widest * call.weight.element_size(), PART_BYTES)


def _convolution(call: Any) -> Convolution:
    return Convolution.of(call.stride, call.padding, call.dilation, call.groups)
