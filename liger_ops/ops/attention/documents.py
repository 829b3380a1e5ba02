"""A batch of rows, with padding or packed documents, as the documents of `varlen_attention`.

A mask over the keys of each row is read on the device. Its first and its last visible key are the
row's document, behind one of the padding before it, which has no keys; its queries include those of
the padding behind it, which see the tokens before them, as with the mask. A mask with holes between
the two is passed too, and is right at the op's price for it. So one program serves every batch: a
mask of ones, padding on either side, and any other. Packed documents are found by an op
(`packed_documents`), which tells the host how many there are. An NPU's operator takes all documents
on the host, where another op has them, in one look for all layers and their backward.

These functions take `call`, which calls a function or writes the call into a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import library
from . import varlen_attention  # noqa: F401
from .packed_documents import DOCUMENT_BOUNDS, PACKED_DOCUMENTS

Call = Callable[..., Any]
VARLEN_ATTENTION = getattr(torch.ops, library.NAMESPACE).varlen_attention.default


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` at once: the `call` of code that is not written into a graph."""
    return function(*args, **kwargs)


class Documents(NamedTuple):
    """The arguments of `varlen_attention` that say which tokens see each other.

    Attributes:
        cu_seqlens, lengths, key_mask: those of the op, tensors or nodes.
        window_left: that of the op.
        bounds: that of the op.
    """

    cu_seqlens: Any
    lengths: Any = None
    key_mask: Any = None
    window_left: int = -1
    bounds: Any = None


def rows(call: Call, batch: Any, length: Any, device: torch.device) -> Documents:
    """Return a batch whose rows are a document each."""
    last = call(operator.add, batch, 1)

    def starts(device: torch.device) -> Any:
        numbers = call(torch.arange, last, dtype=torch.int32, device=device)
        return call(operator.mul, numbers, length)

    # Without a look.
    on_host = Documents(starts(torch.device("cpu"))) if device.type == ON_HOST else None
    return _with_bounds(call, Documents(starts(device)), device, on_host)


# The device whose engine takes the documents on the host.
ON_HOST = "npu"


def _with_bounds(
    call: Call, documents: Documents, device: torch.device, on_host: Documents | None = None
) -> Documents:
    """Return documents with `bounds` of the long form, if the device's engine takes it.

    `on_host` are the same documents, in the memory of the host.
    """
    if device.type != ON_HOST:
        return documents
    read = documents if on_host is None else on_host
    bounds = call(DOCUMENT_BOUNDS, read.cu_seqlens, read.lengths, read.key_mask)
    return documents._replace(bounds=bounds)


def packed_rows(call: Call, begins: Any, device: torch.device) -> Documents:
    """Return a batch whose rows have a document from each token where `begins`, a boolean (batch,
    length), is True, and from their first."""
    found = call(PACKED_DOCUMENTS, begins)
    cu_seqlens, bounds = (call(operator.getitem, found, i) for i in range(2))
    return _with_bounds(call, Documents(cu_seqlens, bounds=bounds), device)


def padded_rows(
    call: Call, is_key: Any, batch: Any, length: Any, device: torch.device
) -> Documents:
    """Return a batch whose keys are where `is_key`, a boolean (batch, length), is True."""
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    token = call(torch.arange, length, **numbers)
    end = call(torch.amax, call(torch.where, is_key, call(operator.add, token, 1), 0), 1)
    # A row without keys begins and ends at 0.
    before_end = call(torch.where, is_key, token, call(torch.unsqueeze, end, 1))
    first = call(torch.amin, before_end, 1)
    start = call(operator.mul, call(torch.arange, batch, **numbers), length)
    begins = call(torch.stack, (start, call(operator.add, start, first)), 1)
    total = call(torch.full, (1,), call(operator.mul, batch, length), **numbers)
    lengths = call(torch.stack, (call(torch.zeros_like, end), call(operator.sub, end, first)), 1)
    documents = Documents(
        call(torch.cat, (call(torch.flatten, begins), total)),
        call(torch.flatten, lengths),
        call(torch.flatten, is_key),
    )
    return _with_bounds(call, documents, device)


def attend(
    call: Call, operands: Sequence[Any], documents: Documents, batch: Any, length: Any,
    scale: float | None, softcap: float | None = None, sinks: Any = None,
) -> Any:  # fmt: skip
    """Compute causal attention of (batch, heads, length, D): (batch, length, heads, D)."""
    query, key, values = (
        call(torch.flatten, call(torch.transpose, x, 1, 2), 0, 1) for x in operands
    )
    cu_seqlens, lengths, key_mask, left, bounds = documents
    y = call(
        VARLEN_ATTENTION, query, key, values, cu_seqlens, length,
        lengths, key_mask, sinks, left, 0, scale, softcap, "auto", bounds,
    )  # fmt: skip
    return call(torch.unflatten, y, 0, (batch, length))
