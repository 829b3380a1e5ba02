"""Flash attention with a sliding window.

The kernel skips the blocks outside of the window, takes grouped heads, and needs no compilation. It
is faster than flex_attention for heads of more than 128 numbers. Forward and backward on an H100,
ms by flash attention and by flex_attention:

    4 x 4096, 4 heads of 256 and 1 of keys, window 512      0.92   1.65
    4 x 4096, 12 heads of 192 and 4 of keys, window 512     1.95   3.31
    4 x 4096, 32 heads of 128 and 8 of keys, window 512     3.11   3.11
    2 x 8192, 32 heads of 128 and 8 of keys, window 4096   10.48   8.05
    4 x 4096, 32 heads of 64 and 8 of keys, window 512      1.99   1.61
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.canonical import same
from .mask.blocks import Call

# Sizes of heads for which it is faster; it takes multiples of 8.
HEAD_DIMS = range(136, 257, 8)
# The backward pass of larger heads does not fit into the shared memory of other GPUs.
LARGE_HEAD_DIM = 192
LARGE_HEADS_ON = ((8, 0), (9, 0), (10, 0))


def is_faster(query: Tensor, key: Tensor, values: Tensor) -> bool:
    """Return whether flash attention takes these tensors (B, H, S, D) and is faster.

    While Dynamo traces, the largest size of heads of the GPU is a constant.
    """
    head_dim = query.shape[-1]
    if not query.is_cuda or not isinstance(head_dim, int) or head_dim not in HEAD_DIMS:
        return False
    if not same(head_dim, values.shape[-1]) or not same(query.shape[-2], key.shape[-2]):
        return False
    return head_dim <= _largest_head_dim(query.device.index)


@torch.compiler.assume_constant_result
def _largest_head_dim(device: int | None) -> int:
    if not torch.backends.cuda.flash_sdp_enabled():
        return 0
    takes_large_heads = torch.cuda.get_device_capability(device) in LARGE_HEADS_ON
    return HEAD_DIMS[-1] if takes_large_heads else LARGE_HEAD_DIM


def attend(
    call: Call, operands: tuple[Any, Any, Any], tokens: Sequence[Any], scale: float | None,
    window_size: int,
) -> Any:  # fmt: skip
    """Compute causal attention in which a query sees the last `window_size` keys up to its own.

    `call` calls a function or inserts its call; `tokens` are the numbers of queries and of keys.
    """
    by_token = [call(torch.transpose, operand, 1, 2) for operand in operands]
    flash = torch.ops.aten._flash_attention_forward.default
    window = {"window_size_left": window_size - 1, "window_size_right": 0}
    # Behind the tokens: dropout, is_causal, return_debug_mask. The window counts the keys on the
    # left of a query's own, which is in the window too.
    result = call(flash, *by_token, None, None, *tokens, 0.0, True, False, scale=scale, **window)
    return call(torch.transpose, call(operator.getitem, result, 0), 1, 2)
