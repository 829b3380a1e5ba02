"""multi_token_attention on a device: a kernel computes p from the scores, p is convolved, and in
the backward another kernel computes the gradient of the scores from that of p.

Query i has the scores of keys 0 to i. The others are not loaded, and count as -inf, for which p is
0. In a row with NaN all of p is NaN, as PyTorch's softmax of a masked row is.

PyTorch computes the convolution here, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import library
from ....ops.attention.multi_token_attention import Convolution
from ....ops.heads.head import chunks
from ..softmax.sparsemax_math import above, below_maximum, sparsemax_gradient


@triton.jit
def probability(x, maximum, total, SPARSE: tl.constexpr):
    """Compute p. `total` is the sum of a row's exponentials or, if SPARSE, the threshold of its
    sparsemax. `maximum` is finite, unless SPARSE."""
    if SPARSE:
        return above(below_maximum(x, maximum), total)
    else:
        return tl.exp(x - maximum) / total


@triton.jit
def score_gradient(dp, p, mean, SPARSE: tl.constexpr):
    """Compute the gradient of scores. `mean` is the sum of p * dp or, if SPARSE, the mean of dp
    over the support."""
    if SPARSE:
        return sparsemax_gradient(dp, p, mean)
    else:
        return p * (dp - mean)


class CausalConvolution(Convolution):
    """The convolution, with zeros where the key is after the query. A device's kernels are a
    subclass."""

    def takes(self, weight: Tensor) -> bool:
        """Return whether this class can convolve with this weight."""
        return True

    def forward(self, p: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, contiguous. p is contiguous, and 0 where the key is after the query."""
        # In place, tril writes nothing but the zeros.
        return self(p, weight, bias).contiguous().tril_()

    def masked(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dc, dy with zeros where the key is after the query, for the methods below."""
        return dy.to(weight.dtype).tril()

    def gradient_of_input(self, dc: Tensor, weight: Tensor, L: int) -> Tensor:
        """Return dp, of weight's dtype."""
        # As in torch.nn.grad.conv2d_input: of the convolution's input, only the shape is used.
        channels = weight.shape[1] * self.groups
        shape_of_p = weight.new_empty(1).expand(len(dc), channels, L, L)
        dp, _, _ = self.gradients(dc, shape_of_p, weight, [True, False, False])
        assert dp is not None
        return dp

    def gradients_of_weights(
        self, dc: Tensor, p: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return dweight and, with `bias`, dbias, of weight's dtype or float32."""
        _, dweight, _ = self.gradients(dc, p, weight, [False, True, False])
        assert dweight is not None
        return dweight, dc.sum((0, 2, 3), dtype=torch.float32) if bias else None


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
