"""varlen_attention on NPUs: npu_fusion_attention of torch_npu and its gradient. It was never run on
a device: a stand-in checks the arguments by the documentation.

The documentation is Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/
torch_npu-npu_fusion_attention.md, and the docstring in torch_npu 2.13; the schema of the gradient
is that of torch_npu 2.9's rules for DTensor. By these:

* With input_layout="TND" the operator takes the ends of the documents' queries and of their keys,
  lists of numbers on the host, at most 1024. npu_fusion_attention_v3 takes tensors, on the host
  too. The argument `bounds` of its long form has them; without it a call reads the documents, and
  waits for the device. More documents are more calls.
* No row of the mask may be hidden whole. So tokens of no document, documents without keys, and
  queries whose window begins behind the last key are left out, and the others are gathered.
* sparse_mode=2 is causal attention from the first query and key on, for any number of either.
  sparse_mode=4 is a band: query i of n, with m keys, is in the place of key i + m - n, and sees
  pre_tockens keys before and next_tockens keys behind it. So with a window, documents that differ
  in m - n are calls of their own. Both take the mask of a causal document of 2048 tokens, True
  where a key is hidden. Without a mask every query sees all keys of its document.
* key and value have the same shape. Zeros complete the narrower of the heads, and change nothing.
* softmax_max and softmax_sum, the statistics of the softmax, are float32, (T, H, 8), with 8 equal
  numbers for each query. softmax_layout="TND" has them in this order; by default each document has
  an order of its own.

The gradient computes the softmax as exp(s - softmax_max) / softmax_sum, so it is given lse, and 1.
With sinks both are applied to the operator's results: y is multiplied by exp(lse - lse'), and lse'
is the logarithm of the whole denominator. The gradient of y' with lse' is exact. The operator has
an argument for sinks since CANN 8.5; how its gradient returns theirs is not documented.

The definition runs in place of the operator for a key_mask that hides a key of a document; for a
softcap; for float32, whose precision is not documented; for more than 256 heads; and within
`liger_ops.invariant`. Outside of it the definition is given a document at a time, so that it holds
the scores of one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .... import library
from ....invariant_mode import is_invariant
from ....ops.attention.document_blocks import gradient_of_sinks
from ....ops.attention.document_bounds import (
    SHORT,
    HostDocument,
    HostDocuments,
    document_bounds,
    host_documents,
)
from ....ops.attention.varlen_attention import scale_of

DTYPES = (torch.float16, torch.bfloat16)
MOST_HEADS, MOST_DOCUMENTS, MOST_TOKENS = 256, 1024, 2**20
MASK_SIZE = 2048
# Each number of the softmax's statistics is repeated to 32 bytes.
REPEATED = 8

# Rows of a tensor: neighbours, or the numbers of the rows.
Rows = slice | Tensor


class OperatorCall(NamedTuple):
    """The queries and the keys of one call, and the operator's arguments for their documents."""

    queries: Rows
    keys: Rows
    options: dict[str, Any]


def operator_calls(call: Any, on_host: HostDocuments) -> list[OperatorCall] | None:
    """Return the calls that compute `call`, or None if the operator does not take it."""
    T, H, _ = call.query.shape
    if (
        call.query.dtype not in DTYPES
        or call.softcap is not None
        or not 0 < H <= MOST_HEADS
        or T > MOST_TOKENS
        or on_host.hides_keys
    ):
        return None
    return [
        _operator_call(call, difference, documents[i : i + MOST_DOCUMENTS])
        for difference, documents in _by_difference(call, on_host.documents).items()
        for i in range(0, len(documents), MOST_DOCUMENTS)
    ]


def documents_of(call: Any) -> HostDocuments:
    """Return the documents of a call, which waits for the device unless its bounds have them."""
    bounds = call.bounds
    if bounds is None or len(bounds) == SHORT:
        bounds = document_bounds(call.cu_seqlens, call.lengths, call.key_mask)
    return host_documents(bounds)


def _by_difference(call: Any, documents: Sequence[HostDocument]) -> dict[int, list[HostDocument]]:
    """Return the queries and keys that see each other, by how many more keys there are, if that
    changes the operator's arguments."""
    found: dict[int, list[HostDocument]] = {}
    T, left = call.query.shape[0], call.window_left
    for start, size, keys in documents:
        keys = min(max(keys, 0), size)
        queries = size if left < 0 else min(size, keys + left)
        if keys > 0 and 0 <= start <= start + size <= T:
            difference = keys - queries if _is_band(call) else 0
            found.setdefault(difference, []).append(HostDocument(start, queries, keys))
    return found


def _is_band(call: Any) -> bool:
    return call.window_left >= 0 or call.window_right > 0


def _operator_call(call: Any, difference: int, documents: Sequence[HostDocument]) -> OperatorCall:
    device, left, right = call.query.device, call.window_left, call.window_right
    options: dict[str, Any] = {}
    if left >= 0 or right >= 0:
        options = {"atten_mask": _causal_mask(device), "sparse_mode": 2}
    if _is_band(call):
        # No document is longer than T.
        T = call.query.shape[0]
        before, after = (T if bound < 0 else min(bound, T) for bound in (left, right))
        options |= {
            "sparse_mode": 4,
            "pre_tockens": before + difference,
            "next_tockens": after - difference,
        }
    rows = []
    for name, sizes in (
        ("actual_seq_qlen", [document.size for document in documents]),
        ("actual_seq_kvlen", [document.keys for document in documents]),
    ):
        spans = [(document.start, size) for document, size in zip(documents, sizes, strict=True)]
        rows.append(_rows(spans, device))
        options[name] = list(accumulate(sizes))
    return OperatorCall(*rows, options)


def _rows(spans: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """Return the rows of spans, which are given as their first row and their size."""
    runs: list[list[int]] = []
    for start, size in spans:
        if runs and runs[-1][1] == start:
            runs[-1][1] = start + size
        else:
            runs.append([start, start + size])
    if len(runs) == 1:
        return slice(*runs[0])
    # A copy of numbers from the host could wait for the device.
    return torch.cat([torch.arange(*run, device=device) for run in runs])


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _operands(call: Any, tensors: Sequence[Tensor], rows: Sequence[Rows]) -> Iterator[Tensor]:
    """Yield these rows of the tensors, contiguous, with heads of the same width."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    for x, of_x in zip(tensors, rows, strict=True):
        chosen = x[of_x]
        if chosen.shape[-1] < width:
            chosen = F.pad(chosen, (0, width - chosen.shape[-1]))
        yield chosen.contiguous()


def _seen(lse: Tensor, share: Tensor) -> Tensor:
    """Return a share of each denominator, and 0 where that is 0."""
    return torch.where(lse.isneginf(), 0.0, share)


@torch.no_grad()
def _by_definition(name: str, call: Any) -> Any:
    return library.OPS[name].definition(*call)


def _documents(call: Any, on_host: HostDocuments) -> Iterator[tuple[slice, Any]]:
    """Yield the tokens of each document, and the call of it alone."""
    for i, document in enumerate(on_host.documents):
        tokens = slice(document.start, document.start + document.size)
        if document.size > 0:
            of_tokens = {
                name: getattr(call, name)[tokens]
                for name in ("query", "key", "value", "key_mask", "dy", "y")
                if getattr(call, name, None) is not None
            }
            if "lse" in call._fields:
                of_tokens["lse"] = call.lse[:, tokens]
            yield (
                tokens,
                call._replace(
                    **of_tokens,
                    cu_seqlens=call.cu_seqlens[i : i + 2] - document.start,
                    lengths=None if call.lengths is None else call.lengths[i : i + 1],
                    sinks=None if call.sinks is None else call.sinks.float(),
                    bounds=None,
                ),
            )


# allocates=True, because the definition allocates its results.
@library.kernel("varlen_attention_forward", "npu", allocates=True)
def forward(call: Any) -> Any:
    name = "varlen_attention_forward"
    if is_invariant():
        return _by_definition(name, call)
    y, lse = library.allocate(name, call)
    # Tokens of no document see no key.
    y.zero_()
    lse.fill_(-float("inf"))
    on_host = documents_of(call)
    calls = operator_calls(call, on_host)
    if calls is None:
        if call.sinks is not None:
            lse.copy_(call.sinks.unsqueeze(-1))
        for tokens, of_document in _documents(call, on_host):
            y[tokens], lse[:, tokens] = _by_definition(name, of_document)
        return y, lse
    for queries, keys, options in calls:
        result, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            *_operands(call, (call.query, call.key, call.value), (queries, keys, keys)),
            call.query.shape[1],
            "TND",
            scale=scale_of(call),
            softmax_layout="TND",
            **options,
        )
        y[queries] = result[..., : y.shape[-1]]
        lse[:, queries] = (largest + total.log())[..., 0].t()
    if call.sinks is not None:
        with_sinks = torch.logaddexp(lse, call.sinks.float().unsqueeze(-1))
        y *= _seen(lse, (lse - with_sinks).exp()).t().unsqueeze(-1)
        lse = with_sinks
    return y, lse


@library.kernel("varlen_attention_backward", "npu", allocates=True)
def backward(call: Any) -> Any:
    name = "varlen_attention_backward"
    if is_invariant():
        return _by_definition(name, call)
    outputs = library.allocate(name, call)
    for output in outputs:
        if output is not None:
            output.zero_()
    on_host = documents_of(call)
    calls = operator_calls(call, on_host)
    if calls is None:
        return _gradients_by_document(name, call, on_host, outputs)
    *gradients, dsinks = outputs
    if dsinks is not None:
        delta = torch.einsum("the,the->ht", call.dy.float(), call.y.float())
        dsinks.copy_(gradient_of_sinks(call, delta))
    wants_any = any(gradient is not None for gradient in gradients)
    for queries, keys, options in calls if wants_any else ():
        tensors = (call.query, call.key, call.value, call.dy, call.y)
        *operands, y = _operands(call, tensors, (queries, keys, keys, queries, queries))
        lse = call.lse[:, queries].t().unsqueeze(-1).expand(-1, -1, REPEATED).contiguous()
        results = torch.ops.npu.npu_fusion_attention_grad(
            *operands, call.query.shape[1], "TND",
            softmax_max=lse, softmax_sum=torch.ones_like(lse), attention_in=y,
            scale_value=scale_of(call), softmax_layout="TND", **options,
        )  # fmt: skip
        for gradient, rows, result in zip(
            gradients, (queries, keys, keys), results[:3], strict=True
        ):
            if gradient is not None:
                gradient[rows] = result[..., : gradient.shape[-1]]
    return outputs


def _gradients_by_document(
    name: str, call: Any, on_host: HostDocuments, outputs: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Compute the gradients by the definition into `outputs`, which are 0."""
    *gradients, dsinks = outputs
    total = 0.0
    for tokens, of_document in _documents(call, on_host):
        *results, dsinks_of_document = _by_definition(name, of_document)
        for gradient, result in zip(gradients, results, strict=True):
            if gradient is not None:
                gradient[tokens] = result
        if dsinks is not None:
            total = total + dsinks_of_document
    if dsinks is not None:
        dsinks.copy_(torch.as_tensor(total))
    return outputs
