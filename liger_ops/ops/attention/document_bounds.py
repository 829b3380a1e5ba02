"""The documents of `varlen_attention` as numbers of the host, where engines take them: the argument
`bounds`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# How many numbers the short form of `bounds` has, and those of the long form before cu_seqlens.
SHORT, BEFORE_DOCUMENTS = 2, 3


class HostDocument(NamedTuple):
    """The first token of a document, how many tokens it has, and how many of them are keys."""

    start: int
    size: int
    keys: int


class HostDocuments(NamedTuple):
    """The documents of the long form of `bounds`.

    Attributes:
        documents: those before the empty ones behind the last.
        hides_keys: whether the mask hides a key of a document.
    """

    documents: list[HostDocument]
    hides_keys: bool


def document_bounds(
    cu_seqlens: Tensor, lengths: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Return the long form of `bounds`, an argument of `varlen_attention`, in a single look.

    These are, for N = M - 1 documents: the number of documents before the empty ones behind the
    last; the length of the longest; 1 if key_mask hides a key of a document, or else 0; cu_seqlens;
    and how many keys each document has.

    Returns:
        bounds: (3 + M + N,), int64, on the CPU.
    """
    sizes = cu_seqlens.diff()
    keys = sizes if lengths is None else torch.minimum(lengths.clamp(min=0), sizes)
    hides = cu_seqlens.new_zeros(1)
    if key_mask is not None and len(sizes):
        hidden = F.pad((~key_mask).cumsum(0), (1, 0))
        starts = cu_seqlens[:-1]
        hides = (hidden[starts + keys] > hidden[starts]).any().view(1)
    numbers = torch.cat([hides, cu_seqlens, keys]).to(torch.int64).cpu()
    sizes = numbers[1 : 1 + len(cu_seqlens)].diff()
    filled = sizes.nonzero().flatten()
    count = int(filled[-1]) + 1 if len(filled) else 0
    longest = int(sizes.max()) if len(filled) else 0
    return torch.cat([numbers.new_tensor([count, longest]), numbers])


def host_documents(bounds: Tensor) -> HostDocuments:
    """Return what the long form of `bounds` says."""
    M = (len(bounds) + 1 - BEFORE_DOCUMENTS) // 2
    count, _, hides = bounds[:BEFORE_DOCUMENTS].tolist()
    starts, keys = bounds[BEFORE_DOCUMENTS:].split([M, M - 1])
    spans = pairwise(starts[: count + 1].tolist())
    documents = [
        HostDocument(start, end - start, number)
        for (start, end), number in zip(spans, keys[:count].tolist(), strict=True)
    ]
    return HostDocuments(documents, bool(hides))


def bounded(call: Any) -> Any:
    """Return a call without the empty documents behind the last, by its argument `bounds`.

    A CUDA graph that is recorded will serve other batches too, so it keeps them.
    """
    if call.bounds is None or (call.query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return call
    count, longest = call.bounds[:SHORT].tolist()
    count = min(max(count, 0), call.cu_seqlens.shape[0] - 1)
    return call._replace(
        cu_seqlens=call.cu_seqlens[: count + 1],
        lengths=None if call.lengths is None else call.lengths[:count],
        max_seqlen=max(min(longest, call.max_seqlen), 1),
        bounds=None,
    )
