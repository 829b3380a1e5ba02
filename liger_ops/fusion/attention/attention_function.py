"""The mask functions and attention functions that `fuse` registers in transformers.

A mask function makes a mask for the fastest exact engine. The mask is None if attention is causal
and nothing else: scaled_dot_product_attention is then called with is_causal=True. Causal windows
and padding are `Documents`, which a compiled model computes without a look at its padding, but for
one look a step on an NPU. Where flex_attention runs, other masks are block masks. The model's own
mask function makes the mask on other devices; on an NPU if it is not of documents, or the attention
may have a soft cap; in float32, for queries that follow a cache, and for mask functions of users,
which need not accept indices that broadcast. Within `liger_ops.invariant` documents are made on any
device, in any dtype and for caches, and block masks are refused.

An attention function calls varlen_attention with documents, flex_attention with a block mask, and
with any other mask the model's own function: scaled_dot_product_attention, or the code in the
model's file.
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
from ...invariant_mode import NotInvariantError, is_invariant
from ...ops.attention.documents import Documents, attend, called, padded_rows, rows
from ...ops.attention.varlen_attention import FLASH_DTYPES
from ...rewrites.attention.flex_attention import kernel_options, obstacle, score_of, with_sinks
from ...rewrites.attention.masked_attention import DEVICES
from ...torch_private import has_triton, native_attention
from ..versions import read
from .block_masks import AnnotatedBlockMask, MaskFunction, block_mask, dense
from .cached_attention import CachedDocuments, attend_cached, cached_documents

# PyTorch's own function, which context_parallel replaces.
SDPA = native_attention
NOT_COVERED = (
    "liger_ops.invariant: the attention of this model is covered with padding, causal windows,"
    " packed documents and caches that grow, without dropout, output_attentions and position biases"
)
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
        if isinstance(attention_mask, (AnnotatedBlockMask, Documents, CachedDocuments)):
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
            if isinstance(attention_mask, CachedDocuments):
                raise NotInvariantError(NOT_COVERED)
            attention_mask = dense(attention_mask, query.shape[0], query.shape[2])
            if adds:
                zero, low = torch.zeros_like(query[:1, :1, :1, :1]), torch.finfo(query.dtype).min
                attention_mask = torch.where(attention_mask, zero, low)
        if adds and is_invariant():
            # Products of a model's own code sum over all keys, which would not be noticed.
            raise NotInvariantError(NOT_COVERED)
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
    mask: AnnotatedBlockMask | Documents | CachedDocuments, scale: float | None,
    sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute attention of (batch, heads, length, D) with a mask: (batch, length, heads, D).

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
    operands = (query, key, value)
    if isinstance(mask, CachedDocuments):
        return attend_cached(operands, mask, scale, softcap, sinks)
    if isinstance(mask, Documents):
        batch, _, length, _ = query.shape
        return attend(called, operands, mask, batch, length, scale, softcap, sinks)
    return _flex(*operands, mask, scale, sinks, softcap).transpose(1, 2).contiguous()


def _flex(
    query: Tensor, key: Tensor, value: Tensor,
    mask: AnnotatedBlockMask, scale: float | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    if is_invariant():
        raise NotInvariantError(
            "liger_ops.invariant: of masks, those of padding, causal windows and packed documents"
            " are covered; this model's mask shows other keys"
        )
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
        causal_is_none: whether a causal mask is None, and not documents.
        gives_means: whether a query that sees no key is to get the mean of all values, as it does
            with a mask that adds the lowest number.
        current: returns the function that the model would call now. If it is not `original`, it is
            called.
    """

    def mask_of(*args: Any, **given: Any) -> Any:
        now = original if current is None else current()
        if now is not original:
            return now(*args, **given)
        if args or not _is_for_engines(given, gives_means):
            mask = None
            if is_invariant() and not args:
                longest = given["q_length"] + given["kv_length"]
                mask = cached_documents(given, _size_of_window({**given, "kv_length": longest}))
            return original(*args, **given) if mask is None else mask
        padding, size = given.get("attention_mask"), _size_of_window(given)
        if padding is not None and not is_tracing(padding) and bool(padding.all()):
            padding = None
        if padding is None and size == 0 and causal_is_none and not is_invariant():
            return None
        # By documents, a query that sees no key gets 0.
        needs_means = gives_means and padding is not None and not is_invariant()
        if size is not None and not needs_means:
            return _documents(given, padding, size)
        if gives_means and given.get("dtype") == torch.float16:
            # The lowest float16 does not absorb every score: with it added scores still differ, and
            # a query that sees no key does not get the mean.
            return original(*args, **given)
        if not _takes_blocks(given["device"]):
            return original(*args, **given)
        return _make_block_mask(given, _padded(given["mask_function"], padding), gives_means)

    return mask_of


def documents_function(
    original: Callable[..., Any], current: Callable[[], Any], has_cap: bool = False
) -> Callable[..., Documents | None]:
    """Return a mask function that returns the rows of a batch without padding as documents, if its
    mask is causal or a causal window and `mask_function` would make it, or else None. `has_cap`
    says whether the attention may have a soft cap."""

    def documents(*args: Any, **given: Any) -> Documents | None:
        is_made = not args and current() is original and _is_for_engines(given, has_cap)
        if not is_made or given.get("attention_mask") is not None:
            return None
        if read(given["config"], "attention_chunk_size") and given.get("local_size") is not None:
            # With documents transformers may count chunks by positions.
            return None
        size = _size_of_window(given)
        return None if size is None else _documents(given, None, size)

    return documents


def _is_for_engines(given: dict[str, Any], has_cap: bool) -> bool:
    """Return whether a fast engine takes the mask: for as many queries as keys, both from 0."""
    if not has_engine(**given, has_cap=has_cap):
        return False
    offsets = given.get("q_offset", 0), given.get("kv_offset", 0)
    if not all(isinstance(offset, int) and offset == 0 for offset in offsets):
        return False
    length, padding = given["q_length"], given.get("attention_mask")
    if length != given["kv_length"] or length == 1 or given.get("use_vmap", False):
        return False
    return padding is None or (padding.dim() == 2 and padding.shape[-1] == length)


def _size_of_window(given: dict[str, Any]) -> int | None:
    """Return the size of the window of a mask that is causal within a window, and hides nothing
    else but padding: 0 for a causal mask, and None for another mask.

    For such a mask transformers allows that a causal mask is skipped.
    """
    if given.get("allow_is_bidirectional_skip", False):
        return None
    if not given.get("allow_is_causal_skip", True):
        return None
    size, config = given.get("local_size"), given.get("config")
    if size is None or given["kv_length"] < size:
        return 0
    # The size of a chunk is a local_size too.
    is_window = config is not None and read(config, "attention_chunk_size") is None
    return size if is_window else None


def _documents(given: dict[str, Any], padding: Tensor | None, size: int) -> Documents:
    batch, length = given["batch_size"], given["q_length"]
    if padding is None:
        documents = rows(called, batch, length, torch.device(given["device"]))
    else:
        documents = padded_rows(called, padding != 0, batch, length, padding.device)
    return documents._replace(window_left=size - 1 if size else -1)


def has_engine(
    device: Any = "cpu", dtype: torch.dtype | None = None, has_cap: bool = False, **_: Any
) -> bool:
    """Return whether the engines of varlen_attention are the fastest on a device and in a dtype,
    for attention that may have a soft cap if `has_cap`."""
    if EVERYWHERE or is_invariant():
        return True
    kind = torch.device(device).type
    if kind not in DEVICES:
        return False
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    if dtype not in FLASH_DTYPES:
        return False
    if kind == "cuda" and not _runs_on_gpus():
        return False
    return DEVICES[kind] or not has_cap


def _takes_blocks(device: Any) -> bool:
    """Return whether flex_attention is fast on a device with an engine of varlen_attention."""
    return EVERYWHERE or is_invariant() or DEVICES[torch.device(device).type]


@torch.compiler.assume_constant_result
def _runs_on_gpus() -> bool:
    return has_triton() and obstacle() is None


def _make_block_mask(
    given: dict[str, Any], visible: MaskFunction, gives_means: bool = False
) -> AnnotatedBlockMask:
    sizes = given["batch_size"], given["q_length"], given["kv_length"]
    return block_mask(visible, *sizes, given["device"], gives_means=gives_means)


def _padded(inner: MaskFunction, padding: Tensor | None) -> MaskFunction:
    if padding is None:
        return inner

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return inner(b, h, q, k) & padding[b, k]

    return visible
