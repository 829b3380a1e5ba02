"""Attention of tokens to the tokens of their own document, for documents of any lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_1, POSITIVE, Accepted
from ...invariant_mode import is_invariant
from ..heads.head import cast_for_products
from ..tensors import widened
from . import document_blocks

# The engines that compute it on a GPU; see `varlen_attention`.
ENGINES = ("auto", "cudnn", "flash", "triton")
# What PyTorch's FlashAttention takes. For other calls PyTorch has no fused kernel that takes fewer
# heads of keys than of queries.
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
BOUND = Accepted("at least 0, or -1 for no bound", lambda value: value >= -1)


@library.compose
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int | torch.SymInt,
    lengths: Tensor | None = None, key_mask: Tensor | None = None, sinks: Tensor | None = None,
    window_left: int = -1, window_right: int = 0,
    scale: float | None = None, softcap: float | None = None, engine: str = "auto",
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from every token to the tokens of its document, in a batch of documents of any
    lengths.

    Document n is the tokens from cu_seqlens[n] to cu_seqlens[n + 1]. With l_n its keys, which are
    its first lengths[n] tokens or all of them, token i of a document sees its keys j with

        i - window_left <= j <= i + window_right and 0 <= j < l_n and key_mask of j is True

    and, with s_ij = scale * query_i . key_j, or softcap * tanh(s_ij / softcap) if softcap is given,

        y_i = sum_j exp(s_ij) * value_j / (sum_j exp(s_ij) + exp(sink))

    where the sink is its head's number in sinks, and exp(sink) is 0 without sinks. The defaults are
    causal attention. A token that sees no key has y = 0, as have tokens of no document, before
    cu_seqlens[0] and from cu_seqlens[N] on; they have no gradient.

    So a batch of B rows of L tokens with padding is B documents, whatever its padding is:

    * padding on the right: cu_seqlens = [0, L, 2L, ...], and lengths are the rows' own lengths. As
      in a model with a mask, the padding's queries see the tokens before them.
    * padding on the left: two documents a row, the padding, with lengths of 0, and the tokens.

    Scores and the softmax are in float32; the products take their operands in the inputs' dtype and
    sum in float32. The softmax is therefore rounded to that dtype before its product with value.

    On NVIDIA GPUs a product of float32 is one of TF32 if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32". Otherwise it is three, of the high and
    low parts of the numbers, with the errors of float32, as in PyTorch's own attention.

    On a GPU no tensor of T * T elements is made: y and lse are stored, and the backward computes
    the softmax again. The documents are read on the device, so other documents need no compilation.
    The definition, which runs on a CPU, for float64 and under `torch.func`, holds all scores,
    H * T * T numbers.

    cu_seqlens may have room for more documents than there are, with empty ones behind the last, and
    max_seqlen for longer ones, as where code is compiled once for every batch. bounds then says how
    many there are, so that nothing is launched or planned for the others. A CUDA graph is recorded
    for all of them; Inductor's graphs leave the op out, because they take no tensor of the host.

    On a GPU an engine computes it. All give the same numbers within their rounding:

    * "triton": kernels of this package, for every call. A row's sums do not depend on the documents
      around its own, and every sum has a fixed order.
    * "cudnn": cuDNN, by the package nvidia-cudnn-frontend (`pip install 'liger_ops[attention]'`),
      on NVIDIA GPUs for float16 and bfloat16, heads of multiples of 8 up to 128, on Hopper up to
      256, and no softcap. It builds a plan for each number of documents and max_seqlen, both
      rounded up to powers of 2.
    * "flash": PyTorch's own FlashAttention 2, on NVIDIA GPUs for float16 and bfloat16, heads of
      multiples of 8 of the same size for key and value, and neither lengths nor softcap.
    * "auto": LIGER_OPS_ATTENTION of the environment, if that names an engine; otherwise "cudnn" for
      documents of 512 tokens or more, by max_seqlen, and of 128 or more on average, without a
      window or with one of 512 or more; "flash" for heads of more than 128; and "triton", which
      also stands in for an engine that is not installed, or does not take the call. These are the
      fastest on an H200, or within 3% of it.

    Within `liger_ops.invariant` the engine is "triton". An engine that was asked for and does not
    take a call, or one that fails, is replaced by "triton", with one warning that names it and the
    reason. The backward of "cudnn" and "flash" has a fixed order under
    `torch.use_deterministic_algorithms(True)`. If a document is longer than max_seqlen, their
    results are NaN.

    On an NPU it is npu_fusion_attention of torch_npu, also with lengths, windows and sinks. It
    takes the documents on the host: a call waits for the device, and so does its backward, unless
    bounds has its long form. With a window, documents that have other numbers of tokens behind
    their keys are calls of their own. It was never run on an NPU. The definition, a document at a
    time, runs in its place for float32, for a key_mask that hides a key of a document, and for a
    softcap.

    Under autocast query, key and value are cast as
    `torch.nn.functional.scaled_dot_product_attention` casts them.

    This op calls `varlen_attention_forward`, which returns lse too.

    Args:
        query: (T, H, D), floating point, any strides: a batch (B, L, H, D) is its view
            `flatten(0, 1)`. D is at most 256.
        key: (T, H', D), of query's dtype. H' divides H: each head of key serves H / H' neighbouring
            heads of query.
        value: (T, H', E), of query's dtype. E is at most 256.
        cu_seqlens: (M,), int32 or int64, not descending, from 0 to T at most: the first token of
            each of N = M - 1 documents, and the end of the last. A document may be empty. Its data
            is not checked.
        max_seqlen: at least the length of the longest document; not checked.
        lengths: (N,), int32 or int64: the number of tokens of each document that are keys, from 0
            to its length. None for all.
        key_mask: (T,), bool: False for tokens that no query sees. None for none. The engines of
            others do not know it: where it hides a key of a document, which the device finds out,
            "triton" computes the batch again. So padding is told by cu_seqlens and lengths, and
            key_mask costs time only for a mask with holes.
        sinks: (H,), floating point: a score for each head that takes weight and has no value.
        window_left: how many tokens before its own a query sees; -1 for all. A sliding window of w
            tokens, as transformers counts it, is window_left = w - 1.
        window_right: how many tokens after its own a query sees; -1 for all, 0 for none (causal).
        scale: a number above 0; None for 1 / sqrt(D).
        softcap: a number above 0, or None.
        engine: "auto", "cudnn", "flash" or "triton", for a GPU; other devices ignore it.
        bounds: (P,), int64, on the CPU. Of two numbers: how many documents there are before the
            first of the empty ones behind the last, and the length of the longest, at least; not
            checked. None for N and max_seqlen. The long form of 3 + M + N numbers saves a wait on
            an NPU; `torch.ops.liger_graph.document_bounds(cu_seqlens, lengths, key_mask)` computes
            it, once for all layers: behind the two are 1 if key_mask hides a key of a document, or
            else 0, cu_seqlens, and the number of keys of each document.

    Returns:
        y: (T, H, E), contiguous, of query's dtype.

    Raises:
        TypeError: query, key, value or sinks is not floating point, the dtypes of query, key and
            value differ, cu_seqlens or lengths is neither int32 nor int64, key_mask is not bool, or
            bounds is not int64.
        ValueError: the shapes do not fit together, H' does not divide H, or D or E is 0 or above
            256; cu_seqlens is empty; bounds has neither of its lengths; max_seqlen is below 1, or a
            bound of the window below -1; scale or softcap is not a number above 0; engine is
            unknown; bounds is not on the CPU; or the devices of the others differ.

    Source: Dao, "FlashAttention-2", 2023; sinks as in GPT-OSS (OpenAI, 2025).

    Example:
        >>> x = torch.arange(5.0).view(5, 1, 1)
        >>> documents = torch.tensor([0, 2, 5])
        >>> liger_ops.varlen_attention(torch.zeros_like(x), x, x, documents, 3).flatten()
        tensor([0.0000, 0.5000, 2.0000, 2.5000, 3.0000])
    """
    query, key, value = cast_for_products(query, key, value)
    options = (lengths, key_mask, sinks, window_left, window_right, scale, softcap, engine, bounds)
    return varlen_attention_forward(query, key, value, cu_seqlens, max_seqlen, *options)[0]


@library.forward(
    "...",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe),
    returns="y lse",
    axes="query=T h D, key=T h' D: query, value=T h' E: query, cu_seqlens=M: int, lengths=N: int,"
    "key_mask=T: bool, sinks=h, bounds=P: host -> y=T h E, lse=h T: float32+query",
    options={
        "max_seqlen": AT_LEAST_1, "window_left": BOUND, "window_right": BOUND,
        "scale": POSITIVE, "softcap": POSITIVE, "engine": ENGINES,
    },
)  # fmt: skip
def varlen_attention_forward(call: Any) -> tuple[Tensor, Tensor]:
    """Compute `varlen_attention`, and the logarithm of each softmax's denominator.

        lse_i = log(sum_j exp(s_ij) + exp(sink))

    lse is minus infinity for a token that sees no key, without sinks. It has no gradient.

    Returns:
        y: the result of `varlen_attention`.
        lse: (H, T), contiguous, float32; float64 for float64 inputs.

    Raises:
        TypeError, ValueError: as `varlen_attention`.

    Example:
        >>> x, documents = torch.zeros(3, 1, 1), torch.tensor([0, 3])
        >>> liger_ops.varlen_attention_forward(x, x, x, documents, 3)[1]
        tensor([[0.0000, 0.6931, 1.0986]])
    """
    if is_invariant():
        return document_blocks.forward(call, widened(call.query).dtype, scale_of(call))
    attention = _DocumentAttention(call)
    p, lse = attention.softmax()
    y = torch.einsum("hgij,jhe->ihge", p, attention.value)
    return y.flatten(1, 2).to(call.query.dtype).contiguous(), lse.flatten(0, 1)


@library.backward(
    "varlen_attention_forward",
    "dy query key value y lse cu_seqlens max_seqlen lengths key_mask sinks bounds ... output_mask"
    " -> dquery dkey dvalue dsinks",
    returns="dquery dkey dvalue dsinks",
)
def varlen_attention_backward(call: Any) -> Any:
    """Compute the gradient of `varlen_attention_forward`. For i and j that sees j, with c_ij the
    slope of the softcap, 1 - tanh(s_ij / softcap)^2 of the score before it, or 1:

        p_ij     = exp(s_ij - lse_i)
        ds_ij    = p_ij * (dy_i . value_j - dy_i . y_i) * c_ij
        dquery_i = scale * sum_j ds_ij * key_j
        dkey_j   = scale * sum_i ds_ij * query_i
        dvalue_j = sum_i p_ij * dy_i
        dsinks   = -sum_i exp(sink - lse_i) * dy_i . y_i

    An engine that knows no sinks computes the first three from y and lse with the sinks in them.
    Kernels use the forward's y and lse. The definition computes them again, so that it can be
    differentiated.
    """
    inputs = (call.query, call.key, call.value, call.sinks)
    if is_invariant():
        gradients = document_blocks.backward(call, widened(call.query).dtype, scale_of(call))
    else:
        gradients = _gradients(call)
    return tuple(
        gradient.reshape(x.shape).to(x.dtype).contiguous()
        if wanted and gradient is not None and x is not None
        else None
        for wanted, gradient, x in zip(call.output_mask, gradients, inputs, strict=True)
    )


def _gradients(call: Any) -> list[Tensor | None]:
    attention = _DocumentAttention(call)
    p, lse = attention.softmax()
    dy = attention.grouped(call.dy)
    # As a sum over keys: a query without keys has neither.
    # Where p is 0, p * inf would be NaN.
    visible = attention.visible
    dp = torch.where(visible, torch.einsum("ihge,jhe->hgij", dy, attention.value), 0.0)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta.unsqueeze(-1)) * attention.slope * attention.scale
    ds = torch.where(visible, ds, 0.0)
    gradients: list[Tensor | None] = [
        torch.einsum("hgij,jhd->ihgd", ds, attention.key),
        torch.einsum("hgij,ihgd->jhd", ds, attention.query),
        torch.einsum("hgij,ihge->jhe", p, dy),
        None,
    ]
    if attention.sinks is not None:
        # Where no key is seen and the sink has no weight, the share is exp(inf - inf).
        share = torch.where(lse == -float("inf"), 0.0, (attention.sinks - lse).exp())
        gradients[3] = -(share * delta).sum(-1)
    return gradients


def scale_of(call: Any) -> float:
    """Return the factor of a call's scores."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


class _DocumentAttention:
    """The tensors of the definition, and its scores.

    query is (T, key's heads, sharing heads, D), where the sharing heads are the heads of query that
    share a head of key. Scores are (key's heads, sharing heads, T, T), and visible, which says
    whether query i sees key j, is (T, T). A token of no document, or one that is no key, is 0: so
    nothing depends on it, whatever it holds.
    """

    def __init__(self, call: Any) -> None:
        self.call, self.heads = call, call.key.shape[1]
        self.dtype = widened(call.query).dtype
        self.scale = scale_of(call)
        self.inside, is_key, self.visible = self._seen()
        self.query = self.grouped(call.query)
        self.key, self.value = (
            torch.where(is_key[:, None, None], x.to(self.dtype), 0.0)
            for x in (call.key, call.value)
        )
        self.sinks = None
        if call.sinks is not None:
            self.sinks = call.sinks.to(self.dtype).view(self.heads, -1, 1)

    def grouped(self, x: Tensor) -> Tensor:
        """Widen x, a tensor of query's heads, and group the heads that share one of key."""
        x = torch.where(self.inside[:, None, None], x.to(self.dtype), 0.0)
        return x.unflatten(1, (self.heads, -1))

    def _seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which tokens are of a document, which are keys, and visible."""
        call = self.call
        tokens = torch.arange(call.query.shape[0], device=call.query.device)
        count = call.cu_seqlens.shape[0] - 1
        # Of documents with the same first token, all but the last are empty.
        document = torch.searchsorted(call.cu_seqlens, tokens, right=True) - 1
        inside = (document >= 0) & (document < count)
        if count == 0:
            return inside, inside, inside[:, None] & inside
        index = document.clamp(0, count - 1)
        ends = call.cu_seqlens[1:] if call.lengths is None else call.cu_seqlens[:-1] + call.lengths
        is_key = inside & (tokens < ends[index])
        if call.key_mask is not None:
            is_key = is_key & call.key_mask
        visible = (document[:, None] == document) & inside[:, None] & is_key
        distance = tokens - tokens[:, None]
        if call.window_left >= 0:
            visible = visible & (distance >= -call.window_left)
        if call.window_right >= 0:
            visible = visible & (distance <= call.window_right)
        return inside, is_key, visible

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Return the softmax of every query's scores, and its lse, (heads, sharing heads, T)."""
        visible = self.visible
        scores = torch.einsum("ihgd,jhd->hgij", self.query, self.key) * self.scale
        self.slope: Tensor | float = 1.0
        if self.call.softcap is not None:
            capped = torch.tanh(scores / self.call.softcap)
            self.slope = 1 - capped * capped
            scores = capped * self.call.softcap
        scores = torch.where(visible, scores, -float("inf"))
        # From the largest score, not from lse, which is rounded. The softmax does not depend on it.
        with torch.no_grad():
            largest = scores.amax(-1) if scores.numel() else scores.new_full(scores.shape[:-1], 0.0)
            if self.sinks is not None:
                largest = torch.maximum(largest, self.sinks)
            # A query that sees no key has none, and no weight.
            largest = torch.where(largest == -float("inf"), 0.0, largest)
        weights = torch.where(visible, (scores - largest.unsqueeze(-1)).exp(), 0.0)
        total = weights.sum(-1)
        if self.sinks is not None:
            total = total + (self.sinks - largest).exp()
        divisor = torch.where(total == 0, 1.0, total)
        lse = torch.where(total == 0, -float("inf"), largest + divisor.log())
        return weights / divisor.unsqueeze(-1), lse


def _flops(call: Any, by_keys: int, by_values: int) -> int:
    """Count the operations of products of each query with each key, and with each value, as if the
    batch were one document: which documents it holds is known on the device alone."""
    T, H, D = call.query.shape
    return 2 * H * T * T * (D * by_keys + call.value.shape[-1] * by_values)


def _backward_flops(call: Any) -> int:
    # The scores and the softmax's gradient are products too, before those of the gradients.
    wants_query, wants_key, wants_value, _ = call.output_mask
    return _flops(call, 1 + wants_query + wants_key, 1 + wants_value)


library.OPS["varlen_attention_forward"].flops = lambda call: _flops(call, 1, 1)
library.OPS["varlen_attention_backward"].flops = _backward_flops
library.keep_dtypes_under_autocast("varlen_attention_forward", "varlen_attention_backward")
