"""The documents that a batch has, where cu_seqlens and max_seqlen leave room for others.

A program that is compiled once for every batch gives cu_seqlens a document for each token, most of
them empty behind the last. Kernels have programs for each, and cuDNN a plan for as many documents
of max_seqlen tokens. So such a batch is looked at on the host, once for all layers that share its
cu_seqlens. The wait takes as long as the device needs to get there: the host is then no longer
ahead of it. While a CUDA graph is recorded nobody can look, and kernels run for what there may be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Documents times max_seqlen, over tokens, from which a batch is looked at, and the documents below
# which it is not. With padding it is 2.
ROOM = 8
FEW = 64


class _Bounds(NamedTuple):
    version: int
    count: int
    longest: int


# A key is a tensor, as layers are given it; a change in place by PyTorch raises its version.
_found: Any = WeakTensorKeyDictionary()


def bounded(call: Any) -> tuple[Any, Tensor | None]:
    """Return a call with the documents that there are, and the end of the last one, on the device.

    The second is None if the call was not looked at. Otherwise `varlen_completion.complete` makes
    results NaN if the end is another: cu_seqlens were then changed unseen by PyTorch.
    """
    cu_seqlens, T = call.cu_seqlens, call.query.shape[0]
    count = cu_seqlens.shape[0] - 1
    if count < FEW or count * call.max_seqlen <= ROOM * T:
        return call, None
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return call, None
    bounds = _bounds(cu_seqlens, T)
    lengths = None if call.lengths is None else call.lengths[: bounds.count]
    found = call._replace(
        cu_seqlens=cu_seqlens[: bounds.count + 1], lengths=lengths,
        max_seqlen=min(bounds.longest, call.max_seqlen),
    )  # fmt: skip
    return found, cu_seqlens[-1:]


def _bounds(cu_seqlens: Tensor, T: int) -> _Bounds:
    # The version of a tensor of torch.inference_mode is not counted.
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    bounds = _found.get(cu_seqlens)
    if bounds is None or bounds.version != version or version < 0:
        ends = cu_seqlens.clamp(0, T)
        count, longest = torch.stack([(ends < ends[-1]).sum(), ends.diff().max()]).tolist()
        bounds = _Bounds(version, max(count, 1), max(longest, 1))
        _found[cu_seqlens] = bounds
    return bounds
