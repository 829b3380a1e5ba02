"""The ops `liger_graph::packed_documents`, where the documents of a packed batch stand, and
`liger_graph::document_bounds`, the documents of any batch as numbers of the host.

Kernels have programs for each document, and cuDNN a plan for as many, of the longest one's length.
So the host needs these two numbers before it launches attention. The op reads them, once for all
layers and their backward, and returns them as a tensor on the host: as they are data of the graph,
a batch has its own, whatever memory its other tensors reuse. Neither Inductor nor the partitioner
computes an op again that they do not know. An NPU's operator takes all documents on the host: the
second op returns them, in one look too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from .document_bounds import BEFORE_DOCUMENTS, document_bounds

# Not the namespace whose ops have kernels.
NAMESPACE = f"{library.NAMESPACE}_graph"

# The recording of a CUDA graph may not wait for the device.
TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op(
    f"{NAMESPACE}::packed_documents", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _find(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Find the documents of a batch, whose rows are divided by the tokens that begin one.

    Args:
        begins: (B, L), bool: whether a token begins a document. The first of a row does anyway.

    Returns:
        cu_seqlens: (B * L + 1,), int32: the first token of each document, and B * L behind the
            last, so that a compiled graph has the same shapes for every batch.
        bounds: (2,), int64, on the CPU: how many documents there are, and the length of the
            longest.
    """
    is_start = begins.clone()
    is_start[:, :1] = True
    total = is_start.numel()
    starts = is_start.flatten().nonzero().squeeze(1)
    cu_seqlens, bounds = _allocate(begins)
    cu_seqlens.fill_(total)
    cu_seqlens[: len(starts)] = starts
    bounds[0] = len(starts)
    bounds[1] = cu_seqlens[: len(starts) + 1].diff().max() if total else 0
    return cu_seqlens, bounds


@_find.register_fake
def _allocate(begins: Tensor) -> tuple[Tensor, Tensor]:
    cu_seqlens = begins.new_empty((begins.numel() + 1,), dtype=torch.int32)
    return cu_seqlens, torch.empty(2, dtype=torch.int64, device="cpu")


PACKED_DOCUMENTS = getattr(torch.ops, NAMESPACE).packed_documents.default


@torch.library.custom_op(
    f"{NAMESPACE}::document_bounds", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _bounds(cu_seqlens: Tensor, lengths: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Call `document_bounds`."""
    return document_bounds(cu_seqlens, lengths, key_mask)


@_bounds.register_fake
def _allocate_bounds(cu_seqlens: Tensor, lengths: Tensor | None, key_mask: Tensor | None) -> Tensor:
    size = BEFORE_DOCUMENTS + 2 * cu_seqlens.shape[0] - 1
    return torch.empty(size, dtype=torch.int64, device="cpu")


DOCUMENT_BOUNDS = getattr(torch.ops, NAMESPACE).document_bounds.default
