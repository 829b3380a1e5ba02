"""The attention functions that `fuse` registers in transformers.

With a block mask they call flash attention or flex_attention, and with any other mask the model's
own function: scaled_dot_product_attention, or the code in the model's file.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from ...accepted import is_scale
from ...rewrites.attention import flash_attention
from ...rewrites.attention.flex_attention import kernel_options, score_of, with_sinks
from ...rewrites.attention.grouped_attention import FLASH_DTYPES
from ...rewrites.attention.mask.blocks import called
from ...torch_private import native_attention
from .attention_blocks import AnnotatedBlockMask, dense

# PyTorch's own function, which context_parallel replaces.
SDPA = native_attention
# Arguments that change the results, and that only the model's own function takes.
UNSUPPORTED = ("position_bias", "cache")


def attention_function(
    original: Callable[..., Any], adds: str = "", current: Callable[[], Any] | None = None
) -> Callable[..., Any]:
    """Return an attention function to register, for layers that would call `original`.

    Args:
        original: the model's own function.
        adds: "sinks" if `original` adds a column of scores, its argument `s_aux`, to the softmax;
            "softcap" if it caps the scores by its argument `softcap`. Either adds its mask to the
            scores. With "", it takes boolean masks, and neither argument.
        current: returns the function that the model would call now. If it is not `original`, it is
            called.
    """
    has_sinks = adds == "sinks"

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        dropout: float = 0.0, scaling: float | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        now = original if current is None else current()
        if isinstance(attention_mask, AnnotatedBlockMask):
            sinks = others.get("s_aux") if has_sinks else None
            softcap = others.get("softcap")
            is_supported = all(others.get(name) is None for name in UNSUPPORTED) and dropout == 0
            is_supported = (
                is_supported and (softcap is None or adds == "softcap") and now is original
            )
            is_supported = is_supported and _are_scales(scaling, softcap)
            if (
                is_supported
                and (sinks is not None) is has_sinks
                and not others.get("output_attentions")
            ):
                operands = (query, key, value, attention_mask, scaling, sinks, softcap)
                return _attention(*operands), None
            attention_mask = dense(attention_mask)
            if adds:
                zero, low = torch.zeros_like(query[:1, :1, :1, :1]), torch.finfo(query.dtype).min
                attention_mask = torch.where(attention_mask, zero, low)
        arguments = {"dropout": dropout, "scaling": scaling, **others}
        return now(module, query, key, value, attention_mask, **arguments)

    return attention


def _are_scales(*numbers: Any) -> bool:
    """Return whether the engines take these numbers, where None is a default."""
    return all(
        number is None or (isinstance(number, (int, float)) and is_scale(number))
        for number in numbers
    )


def _attention(
    query: Tensor, key: Tensor, value: Tensor,
    mask: AnnotatedBlockMask, scale: float | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute attention of (batch, heads, length, D) with a block mask: (batch, length, heads, D).

    Raises:
        ValueError: scaled_dot_product_attention is replaced.
    """
    if F.scaled_dot_product_attention is not SDPA:
        raise ValueError(
            "liger_ops: attention with a mask must run outside of context_parallel, which replaces"
            " scaled_dot_product_attention; here it would see the keys of this rank alone"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # Autocast covers SDPA and matrix products, and neither flex_attention nor flash attention.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    operands, tokens = (query, key, value), (query.shape[2], key.shape[2])
    has_flash = query.dtype in FLASH_DTYPES and flash_attention.is_faster(*operands)
    if mask.window is not None and sinks is None and softcap is None and has_flash:
        y = flash_attention.attend(called, operands, tokens, scale, mask.window)
    else:
        y = _flex(*operands, mask, scale, sinks, softcap)
    return y.transpose(1, 2).contiguous()


def _flex(
    query: Tensor, key: Tensor, value: Tensor,
    mask: AnnotatedBlockMask, scale: float | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": True}
    options["kernel_options"] = kernel_options(query)
    if softcap is not None:
        scale = (query.shape[-1] ** -0.5 if scale is None else scale) / softcap
    options["scale"] = scale
    if softcap is not None or mask.unseen is not None:
        options["score_mod"] = _scores(softcap, mask.unseen)
    flex = _engine(query, mask, sinks is not None, softcap is not None)
    if sinks is None:
        return flex(query, key, value, **options)
    y, aux = flex(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return with_sinks(called, y, aux.lse, sinks, query.dtype)


def _scores(softcap: float | None, unseen: Tensor | None) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_of(score, softcap, None if unseen is None else unseen[b, q])

    return score_mod


def _engine(
    query: Tensor, mask: AnnotatedBlockMask, has_lse: bool, has_cap: bool
) -> Callable[..., Any]:
    """Return flex_attention, compiled unless it is being traced or runs on the CPU (in tests)."""
    if torch.compiler.is_compiling() or query.device.type == "cpu":
        return flex_attention
    code = getattr(mask.mask_mod, "__code__", None)
    kind = has_lse, has_cap, mask.unseen is None
    return _compiled(code, query.dtype, query.shape[1], query.shape[-1], *kind)


@functools.lru_cache(maxsize=64)
def _compiled(*_: Any) -> Callable[..., Any]:
    """Return flex_attention compiled by itself, once for each kind of call.

    torch.compile counts recompilations per code object, and gives up after a few. Each kind of call
    gets a code object of its own, so that only new sizes count.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
        return flex_attention(query, key, value, **options)

    name = f"attend_{_compiled.cache_info().misses}"
    distinct = types.FunctionType(attend.__code__.replace(co_name=name), attend.__globals__, name)
    compiled = torch.compile(distinct)
    return lambda query, key, value, **options: compiled(query, key, value, options)
