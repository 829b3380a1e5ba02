"""Attention weights, mixed by a convolution over queries, keys and heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ..heads.head import cast_for_products
from ..tensors import widened
from .windows import per_dimension


@library.compose
def multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: int | list[int] = 1, padding: int | list[int] = 0, dilation: int | list[int] = 1,
    groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Compute causal attention weights, mixed over neighbouring queries, keys and heads.

        p_ij = softmax over j <= i of scores_ij, or sparsemax;   p_ij = 0 where j > i
        y_ij = conv2d(p, weight, bias)_ij where j <= i;          y_ij = 0 where j > i

    p is computed in float32 and rounded once, to weight's dtype. The convolution runs in that
    dtype, and y has it. The gradient of scores is computed from p in float32, and rounded once.

    On a GPU, in bfloat16 and float16, with a stride of 1 and groups of at most 64 channels, the
    convolution and its gradients are kernels that skip the masked elements; they sum in float32, in
    a fixed order. In all other cases they are those of `torch.nn.functional.conv2d`, which follow
    PyTorch's settings, such as `torch.backends.cudnn.deterministic` and `allow_tf32`.

    Scores where j > i are not read, whatever they are, and have a gradient of 0. As in `softmax`,
    a score of -inf gives 0; a row whose scores with j <= i are all -inf, or include inf or NaN, is
    NaN, and the convolution spreads NaN to the neighbours.

    Memory: only scores, weight and bias are saved. Besides scores, y and their gradients, the
    forward needs p. The backward takes a part of the batch at a time, for which it needs first p,
    computed again, then dp; with PyTorch's convolution also dy with zeros where j > i. A part has
    as many samples as make 256 MiB of p; if it is the whole batch, the gradient of scores takes
    dp's memory. Saving p instead of scores would need as much memory if nothing else keeps scores,
    and more otherwise.

    Memory traffic beside the convolution, as shares of an L x L tensor: the forward reads 1/2
    (scores) and writes 1 (p), and the backward reads 3/2 and writes 2. With PyTorch's convolution
    the forward writes 1/2 more, and the backward reads 1/2 and writes 1 more. Nothing is read where
    j > i.

    Under autocast, weight and bias are cast as a convolution's are. Scores are not cast. float64
    runs the definition on every device.

    Args:
        scores: (B, C, L, L), a row for each query and a column for each key, floating point. The
            last dimension is fast with a stride of 1.
        weight: (E, G, P, Q), floating point: E channels of y, G = C / groups, and the P x Q
            queries and keys that are mixed.
        bias: (E,), of weight's dtype, or None.
        stride, padding, dilation: of the convolution; a value for both dimensions, or a list of
            one for each. They must give as many columns as rows, (L', L').
        groups: the number of groups into which the convolution splits C and E.
        sparse: whether p is the sparsemax of scores.

    Returns:
        y: (B, E, L', L'), contiguous, of weight's dtype. Odd P and Q with a padding of half
            gives L' = L.

    Raises:
        TypeError: a tensor is not floating point, or bias does not have weight's dtype.
        ValueError: scores are not (B, C, L, L) with L at least 1; weight is not (E, C / groups, P,
            Q), or bias not (E,); groups does not divide C and E; stride or dilation is below 1, or
            padding below 0; the options give another number of rows than of columns, or none; or
            the devices differ.

    Source: Golovneva et al., "Multi-Token Attention", 2025, where the convolution follows the
    softmax.

    Example:
        >>> scores, weight = torch.zeros(1, 1, 3, 3), torch.ones(1, 1, 1, 3)
        >>> liger_ops.multi_token_attention(scores, weight, padding=[0, 1])
        tensor([[[[1.0000, 0.0000, 0.0000],
                  [1.0000, 1.0000, 0.0000],
                  [0.6667, 1.0000, 0.6667]]]])
    """
    weight, *biases = cast_for_products(weight, *([] if bias is None else [bias]))
    bias = biases[0] if biases else None
    options = (stride, padding, dilation, groups, sparse)
    return multi_token_attention_forward(scores, weight, bias, *options)


@library.forward(
    "...",
    axes="scores=b C L L, weight=E G P Q, bias=E: weight -> y=b E L' L'",
    dtype="weight",
)
def multi_token_attention_forward(call: Any) -> Tensor:
    """Compute `multi_token_attention` in the dtypes of its inputs, under autocast too.

    Returns:
        y: the result of `multi_token_attention`.

    Raises:
        TypeError, ValueError: as `multi_token_attention`.

    Example:
        >>> scores = torch.zeros(1, 1, 2, 2)
        >>> liger_ops.multi_token_attention_forward(scores, 2 * torch.ones(1, 1, 1, 1))
        tensor([[[[2., 0.],
                  [1., 1.]]]])
    """
    p = _probabilities(call.scores, call.sparse).to(call.weight.dtype)
    return Convolution.of(call)(p, call.weight, call.bias).tril().contiguous()


@library.backward(
    "multi_token_attention_forward",
    "dy scores weight bias ... output_mask -> dscores dweight dbias",
)
def multi_token_attention_backward(call: Any) -> Any:
    """Compute the gradient of `multi_token_attention`. With dc = dy where j <= i, else 0:

        dweight, dbias, dp = the gradients of the convolution of p, for dc
        dscores = p * (dp - sum_j p * dp), or the gradient of sparsemax

    It is not derived by autograd, which would compute the convolution in float32: here it runs in
    weight's dtype, as in the forward.
    """
    wide, dtype = _probabilities(call.scores, call.sparse), call.weight.dtype
    *of_tensors, of_bias = call.output_mask
    wanted = [*of_tensors, of_bias and call.bias is not None]
    operands = (call.dy.to(dtype).tril(), wide.to(dtype), call.weight, wanted)
    dp, dweight, dbias = Convolution.of(call).gradients(*operands)
    dscores = None
    if dp is not None:
        op = "sparsemax_backward" if call.sparse else "softmax_backward"
        dscores = library.OPS[op].definition(dp, wide).to(call.scores.dtype).contiguous()
    return dscores, _contiguous(dweight), _contiguous(dbias)


class Convolution(NamedTuple):
    """PyTorch's convolution over queries and keys, by its options."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @classmethod
    def of(cls, call: Any) -> Convolution:
        options = (call.stride, call.padding, call.dilation)
        stride, padding, dilation = (per_dimension(values, 2) for values in options)
        return cls(stride, padding, dilation, call.groups)

    def __call__(self, p: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(p, weight, bias, *self)

    def gradients(
        self, dc: Tensor, p: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of p, weight and bias, each None if it is not wanted."""
        if not any(wanted):
            return None, None, None
        gradients = torch.ops.aten.convolution_backward(
            dc, p, weight, weight.shape[:1], *self[:3], False, [0, 0], self.groups, wanted
        )
        return tuple(x if want else None for x, want in zip(gradients, wanted, strict=True))  # type: ignore[return-value]

    def sizes(self, lengths: Any, kernel: Any) -> list[int]:
        """Return the numbers of rows and columns of the result."""
        numbers = zip(lengths, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers]


def _probabilities(scores: Tensor, sparse: bool) -> Tensor:
    """Compute p in the dtype of the arithmetic."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = widened(scores).masked_fill(future, -float("inf"))
    if sparse:
        return library.OPS["sparsemax_forward"].definition(masked)
    return torch.softmax(masked, -1)


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


library.keep_dtypes_under_autocast(
    "multi_token_attention_forward", "multi_token_attention_backward"
)
