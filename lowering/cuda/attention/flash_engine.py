"""varlen_attention by PyTorch's own FlashAttention 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.attention.varlen_attention import FLASH_DTYPES, scale_of
from ...common.tensors import unit_stride
from ..launch import on_nvidia
from .varlen_kernels import MOST_COLUMNS


def obstacle(call: Any) -> str | None:
    """Return why it does not take a call, or None."""
    D, E = call.query.shape[-1], call.value.shape[-1]
    if not on_nvidia(call.query) or torch.cuda.get_device_capability(call.query.device) < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0"
    if call.query.dtype not in FLASH_DTYPES:
        return f"it takes float16 and bfloat16, got {call.query.dtype}"
    if call.softcap is not None or call.lengths is not None:
        return "it takes neither softcap nor lengths"
    if D != E or D % 8 or D > MOST_COLUMNS:
        return f"it takes heads of one multiple of 8 up to {MOST_COLUMNS}, got {D} and {E}"
    return None


def _options(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments behind the tensors, up to is_causal, and those by name."""
    bounds = call.cu_seqlens.int()
    longest = min(call.max_seqlen, call.query.shape[0])
    left, right = (None if n < 0 else n for n in (call.window_left, call.window_right))
    is_causal = left is None and right == 0
    window = {} if is_causal else {"window_size_left": left, "window_size_right": right}
    named = {"scale": scale_of(call), **window}
    return (bounds, bounds, longest, longest, 0.0, is_causal), named


def forward(call: Any, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    tensors = map(unit_stride, (call.query, call.key, call.value))
    positional, named = _options(call)
    # It allocates its results.
    y, lse, *_ = torch.ops.aten._flash_attention_forward(*tensors, *positional, False, **named)
    return y, lse


def backward(call: Any, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    tensors = map(unit_stride, (call.dy, call.query, call.key, call.value))
    positional, named = _options(call)
    # The state of random numbers, which only dropout reads.
    state = torch.zeros(2, dtype=torch.uint64, device=call.y.device)
    unused = torch.empty(0, dtype=torch.uint64, device=call.y.device)
    saved = (call.y.contiguous(), call.lse.contiguous())
    return torch.ops.aten._flash_attention_backward(
        *tensors, *saved, *positional, state, unused, **named
    )
