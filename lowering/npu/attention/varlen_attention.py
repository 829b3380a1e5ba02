"""varlen_attention on NPUs: npu_fusion_attention of torch_npu and its gradient. It was never run on
a device: a stand-in checks the arguments by the documentation.

The documentation is Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/
torch_npu-npu_fusion_attention.md; the schema of the gradient is that of torch_npu 2.9's rules for
DTensor. By these:

* With input_layout="TND" the operator takes the documents as their ends, lists of numbers on the
  host, at most 1024. So a call reads cu_seqlens, and waits for the device. More documents are more
  calls. Tokens of no document are left out.
* sparse_mode=2 is causal attention, sparse_mode=4 is a window of pre_tockens keys before the
  query's own and next_tockens after it. Both take the mask of a causal document of 2048 tokens,
  True where a key is hidden. Without a mask every query sees all keys of its document.
* softmax_max and softmax_sum, the statistics of the softmax, are float32, (T, H, 8), with 8 equal
  numbers for each query. softmax_layout="TND", since torch_npu 7.2 and CANN 8.3, has them in this
  order; by default each document has an order of its own.

The gradient computes the softmax as exp(s - softmax_max) / softmax_sum, so it is given lse, and 1.
With sinks both are applied to the operator's results: y is multiplied by exp(lse - lse'), and lse'
is the logarithm of the whole denominator. The gradient of y' with lse' is exact.

The definition runs in place of the operator for lengths and key_mask, which are not its documents'
own; for a softcap; for float32, whose precision is not documented; for values of another width than
keys; for more than 256 heads; and within `liger_ops.invariant`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....invariant_mode import is_invariant
from ....ops.attention.varlen_attention import scale_of
from ...common.attention.varlen_attention import bounded

DTYPES = (torch.float16, torch.bfloat16)
MOST_HEADS, MOST_DOCUMENTS, MOST_TOKENS = 256, 1024, 2**20
MASK_SIZE = 2048
# Each number of the softmax's statistics is repeated to 32 bytes.
REPEATED = 8


def is_taken(call: Any) -> bool:
    """Return whether the operator takes a call."""
    T, H, D = call.query.shape
    return (
        not is_invariant()
        and call.query.dtype in DTYPES
        and call.lengths is None
        and call.key_mask is None
        and call.softcap is None
        and call.value.shape[-1] == D
        and 0 < H <= MOST_HEADS
        and T <= MOST_TOKENS
        and "softmax_layout" in _argument_names()
    )


@functools.cache
def _argument_names() -> set[str]:
    schema = torch.ops.npu.npu_fusion_attention.default._schema
    return {argument.name for argument in schema.arguments}


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _pieces(call: Any) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Yield the tokens of at most MOST_DOCUMENTS documents, and the operator's arguments for these
    documents."""
    # The operator's own arguments are on the host.
    bounds = bounded(call).cu_seqlens.tolist()
    options = _mask_options(call)
    for i in range(0, len(bounds) - 1, MOST_DOCUMENTS):
        first, *ends = bounds[i : i + MOST_DOCUMENTS + 1]
        if ends[-1] == first:
            continue
        lengths = [end - first for end in ends]
        yield (
            slice(first, ends[-1]),
            {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, **options},
        )


def _mask_options(call: Any) -> dict[str, Any]:
    T, left, right = call.query.shape[0], call.window_left, call.window_right
    if left < 0 and right < 0:
        return {}
    mask = {"atten_mask": _causal_mask(call.query.device)}
    if left < 0 and right == 0:
        return {**mask, "sparse_mode": 2}
    # No document is longer than T.
    before, after = (T if bound < 0 else min(bound, T) for bound in (left, right))
    return {**mask, "sparse_mode": 4, "pre_tockens": before, "next_tockens": after}


@torch.no_grad()
def _by_definition(name: str, call: Any) -> Any:
    return library.OPS[name].definition(*call)


# allocates=True, because the definition allocates its results.
@library.kernel("varlen_attention_forward", "npu", allocates=True)
def forward(call: Any) -> Any:
    if not is_taken(call):
        return _by_definition("varlen_attention_forward", call)
    y, lse = library.allocate("varlen_attention_forward", call)
    # Tokens of no document see no key.
    y.zero_()
    lse.fill_(-float("inf"))
    for tokens, options in _pieces(call):
        inputs = (x[tokens].contiguous() for x in (call.query, call.key, call.value))
        result, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            *inputs,
            call.query.shape[1],
            "TND",
            scale=scale_of(call),
            softmax_layout="TND",
            **options,
        )
        y[tokens] = result
        lse[:, tokens] = (largest + total.log())[..., 0].t()
    if call.sinks is not None:
        with_sinks = torch.logaddexp(lse, call.sinks.float().unsqueeze(-1))
        y *= (lse - with_sinks).exp().t().unsqueeze(-1)
        lse = with_sinks
    return y, lse


@library.kernel("varlen_attention_backward", "npu", allocates=True)
def backward(call: Any) -> Any:
    if not is_taken(call):
        return _by_definition("varlen_attention_backward", call)
    outputs = library.allocate("varlen_attention_backward", call)
    *gradients, dsinks = outputs
    if dsinks is not None:
        delta = torch.einsum("the,the->ht", call.dy.float(), call.y.float())
        share = (call.sinks.float().unsqueeze(-1) - call.lse).exp()
        dsinks.copy_(-(share * delta).sum(-1))
    wanted = [gradient for gradient in gradients if gradient is not None]
    for gradient in wanted:
        gradient.zero_()
    for tokens, options in _pieces(call) if wanted else ():
        inputs = (x[tokens].contiguous() for x in (call.query, call.key, call.value, call.dy))
        lse = call.lse[:, tokens].t().unsqueeze(-1).expand(-1, -1, REPEATED).contiguous()
        results = torch.ops.npu.npu_fusion_attention_grad(
            *inputs, call.query.shape[1], "TND", softmax_max=lse, softmax_sum=torch.ones_like(lse),
            attention_in=call.y[tokens].contiguous(), scale_value=scale_of(call),
            softmax_layout="TND", **options,
        )  # fmt: skip
        for gradient, result in zip(gradients, results[:3], strict=True):
            if gradient is not None:
                gradient[tokens] = result
    return outputs
