"""The mask functions that `fuse` registers in transformers: a mask for the fastest exact engine.

The mask is None if attention is causal and nothing else: scaled_dot_product_attention is then
called with is_causal=True. Where flex_attention runs, other masks are block masks. The model's own
mask function makes the mask on other devices, in float32, for queries that follow a cache, and for
mask functions of users, which need not accept indices that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...rewrites.attention.flex_attention import obstacle
from ...rewrites.attention.grouped_attention import FLASH_DTYPES
from ...torch_private import has_triton
from ..versions import read
from .attention_blocks import AnnotatedBlockMask, MaskFunction, block_mask

# For tests: make block masks on any device and in any dtype.
EVERYWHERE = False


def mask_function(
    original: Callable[..., Any], is_tracing: Callable[[Tensor], bool], causal_is_none: bool,
    gives_means: bool = False, current: Callable[[], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a mask function to register, for layers that would call `original`.

    Args:
        original: the model's own mask function.
        is_tracing: transformers' function that says whether a tensor's data cannot be read.
        causal_is_none: whether a causal mask is None, and not a block mask.
        gives_means: whether a query that sees no key is to get the mean of all values, as it does
            with a mask that adds the lowest number.
        current: returns the function that the model would call now. If it is not `original`, it is
            called.
    """

    def mask(*args: Any, **given: Any) -> Any:
        now = original if current is None else current()
        if now is not original:
            return now(*args, **given)
        if args or not has_engine(**given) or not _fits_flex_attention(given):
            return original(*args, **given)
        padding, size = given.get("attention_mask"), given.get("local_size")
        if padding is not None and not is_tracing(padding) and bool(padding.all()):
            padding = None
        if padding is None and _is_causal_window(given):
            if size is None or given["kv_length"] < size:
                return None if causal_is_none else _make_block_mask(given, _causal)
            config = given.get("config")
            if config is not None and read(config, "attention_chunk_size") is None:
                window_mask = _make_block_mask(given, _sliding(size))
                window_mask.window = size
                return window_mask
        if gives_means and given.get("dtype") == torch.float16:
            # The lowest float16 does not absorb every score: with it added scores still differ, and
            # a query that sees no key does not get the mean.
            return original(*args, **given)
        return _make_block_mask(given, _padded(given["mask_function"], padding), gives_means)

    return mask


def _fits_flex_attention(given: dict[str, Any]) -> bool:
    """Return whether flex_attention takes the mask: for as many queries as keys, both from 0."""
    offsets = given.get("q_offset", 0), given.get("kv_offset", 0)
    if not all(isinstance(offset, int) and offset == 0 for offset in offsets):
        return False
    length, padding = given["q_length"], given.get("attention_mask")
    if length != given["kv_length"] or length == 1 or given.get("use_vmap", False):
        return False
    return padding is None or (padding.dim() == 2 and padding.shape[-1] == length)


def _is_causal_window(given: dict[str, Any]) -> bool:
    """Return whether a mask is causal within local_size, and hides nothing else but padding.

    For such a mask transformers allows that a causal mask is skipped.
    """
    if given.get("allow_is_bidirectional_skip", False):
        return False
    return bool(given.get("allow_is_causal_skip", True))


def has_engine(device: Any = "cpu", dtype: torch.dtype | None = None, **_: Any) -> bool:
    """Return whether flash and flex attention are the fastest on a device and in a dtype."""
    if EVERYWHERE:
        return True
    kind = torch.device(device).type
    if kind != "cuda":
        return False
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return dtype in FLASH_DTYPES and _runs_on_gpus()


@torch.compiler.assume_constant_result
def _runs_on_gpus() -> bool:
    return has_triton() and obstacle() is None


def _make_block_mask(
    given: dict[str, Any], visible: MaskFunction, gives_means: bool = False
) -> AnnotatedBlockMask:
    sizes = given["batch_size"], given["q_length"], given["kv_length"]
    return block_mask(visible, *sizes, given["device"], gives_means=gives_means)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def _sliding(size: int) -> MaskFunction:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - size)

    return visible


def _padded(inner: MaskFunction, padding: Tensor | None) -> MaskFunction:
    if padding is None:
        return inner

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return inner(b, h, q, k) & padding[b, k]

    return visible
