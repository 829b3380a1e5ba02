"""varlen_attention: the documents that a batch has, of those for which cu_seqlens has room."""

from __future__ import annotations

from typing import Any

import torch


def bounded(call: Any) -> Any:
    """Return a call without the empty documents behind the last, by its argument `bounds`.

    A CUDA graph that is recorded will serve other batches too, so it keeps them.
    """
    if call.bounds is None or (call.query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return call
    count, longest = call.bounds.tolist()
    count = min(max(count, 0), call.cu_seqlens.shape[0] - 1)
    return call._replace(
        cu_seqlens=call.cu_seqlens[: count + 1],
        lengths=None if call.lengths is None else call.lengths[:count],
        max_seqlen=max(min(longest, call.max_seqlen), 1),
        bounds=None,
    )
