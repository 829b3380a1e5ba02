"""Attention ops: the number of blocks of attn_res, the sizes of multi_token_attention's
convolution, the heads of neighborhood_attention and varlen_attention, and the windows and documents
of each.
"""

from __future__ import annotations

from typing import Any

from ..ops.attention.document_bounds import BEFORE_DOCUMENTS, SHORT
from ..ops.attention.multi_token_attention import Convolution
from ..ops.attention.windows import per_dimension
from ..ops.tensors import equal
from . import checks
from .checks import op
from .lines import also, gives


@also("attn_res")
def blocks(call: Any) -> None:
    if call.x.shape[0] == 0:
        raise ValueError(
            f"{op(call)}: x must have at least one block, got shape {tuple(call.x.shape)}"
        )


@also("multi_token_attention", first=True)
def convolution(call: Any) -> None:
    """Check the shapes and options from which the size of the result is computed."""
    scores, weight, groups = call.scores, call.weight, call.groups
    if scores.dim() != 4 or scores.shape[2] != scores.shape[3] or scores.shape[2] < 1:
        raise ValueError(
            f"{op(call)}: scores must be (B, C, L, L), with L at least 1, got shape"
            f" {tuple(scores.shape)}"
        )
    if weight.dim() != 4 or 0 in weight.shape:
        raise ValueError(
            f"{op(call)}: weight must be (E, G, P, Q), none of them 0, got shape"
            f" {tuple(weight.shape)}"
        )
    channels = scores.shape[1]
    if groups < 1 or channels % groups != 0 or weight.shape[0] % groups != 0:
        raise ValueError(
            f"{op(call)}: groups must divide the {channels} channels of scores and the"
            f" {weight.shape[0]} rows of weight, got {groups}"
        )
    if weight.shape[1] != channels // groups:
        raise ValueError(
            f"{op(call)}: weight must be (E, {channels // groups}, P, Q) for {channels} channels of"
            f" scores and groups of {groups}, got shape {tuple(weight.shape)}"
        )
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        values = per_dimension(getattr(call, name), 2)
        if len(values) != 2 or min(values) < least:
            raise ValueError(
                f"{op(call)}: {name} must be one or two ints of at least {least}, got {values}"
            )
    rows, columns = Convolution.of(call).sizes(scores.shape[2:], weight.shape[2:])
    if rows < 1 or rows != columns:
        raise ValueError(
            f"{op(call)}: weight, stride, padding and dilation must give as many columns as rows,"
            f" and at least 1, got {rows} rows and {columns} columns"
        )


@gives("L'", "multi_token_attention")
def rows_of_result(call: Any) -> tuple[int]:
    return (Convolution.of(call).sizes(call.scores.shape[2:], call.weight.shape[2:])[0],)


MOST_COLUMNS = 256

gives("like", "neighborhood_attention")(checks.in_layout_of)


@also("neighborhood_attention")
def heads(call: Any) -> None:
    op, shape = checks.op(call), tuple(call.query.shape)
    if len(shape) not in (4, 5):
        raise ValueError(f"{op}: query must have one or two spatial dimensions, got shape {shape}")
    _check_heads(call, "query")


def _check_heads(call: Any, *names: str) -> None:
    """Check the widths of these tensors' heads, and that keys' heads divide those of queries."""
    op, heads, key_heads = checks.op(call), call.query.shape[1], call.key.shape[1]
    for name in names:
        columns = getattr(call, name).shape[-1]
        if not 1 <= columns <= MOST_COLUMNS:
            raise ValueError(
                f"{op}: {name} must have from 1 to {MOST_COLUMNS} elements in its last dimension,"
                f" got {columns}"
            )
    if key_heads < 1 or heads % key_heads != 0:
        raise ValueError(
            f"{op}: the heads of key must divide the {heads} of query, got {key_heads}"
        )


@also("varlen_attention")
def documents(call: Any) -> None:
    _check_heads(call, "query", "value")
    bounds = call.cu_seqlens.shape[0]
    if bounds < 1:
        raise ValueError(f"{op(call)}: cu_seqlens must have at least one element, got none")
    if call.lengths is not None and not equal(
        call.lengths.shape, (bounds - 1,), f"{op(call)}: lengths"
    ):
        raise ValueError(
            f"{op(call)}: lengths must have {bounds - 1} elements, one for each document of"
            f" cu_seqlens, got {call.lengths.shape[0]}"
        )
    if call.bounds is not None:
        size, long = call.bounds.shape[0], BEFORE_DOCUMENTS + 2 * bounds - 1
        is_short = isinstance(size, int) and size == SHORT
        is_long = is_short or equal((size,), (long,), f"{op(call)}: bounds")
        # A size that is a symbol may be either.
        if not is_long and size != SHORT:
            raise ValueError(
                f"{op(call)}: bounds must have {SHORT} elements, or {long} for {bounds} of"
                f" cu_seqlens, got {size}"
            )


@also("neighborhood_attention")
def windows(call: Any) -> None:
    op, lengths = checks.op(call), call.query.shape[2:-1]
    dims = len(lengths)
    options = {}
    for name in ("kernel_size", "dilation", "is_causal"):
        options[name] = per_dimension(getattr(call, name), dims)
        if len(options[name]) != dims:
            raise ValueError(
                f"{op}: {name} must be one value or one for each of {dims} dimensions,"
                f" got {options[name]}"
            )
        if name == "is_causal":
            # The schema has ints for it, because PyTorch has no type for a bool or a list of them.
            if not set(options[name]) <= {0, 1}:
                raise ValueError(f"{op}: is_causal must be True or False, got {options[name]}")
        elif min(options[name]) < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {options[name]}")
    for length, size, dilation, is_causal in zip(lengths, *options.values(), strict=True):
        if is_causal:
            continue
        if call.border == "clipped" and size % 2 == 0:
            raise ValueError(
                f"{op}: kernel_size must be odd if border is 'clipped' and the dimension is not"
                f" causal, got {size}"
            )
        if call.border == "shifted" and size * dilation > length:
            raise ValueError(
                f"{op}: kernel_size * dilation must be at most the {length} positions of the"
                f" dimension if border is 'shifted', got {size} * {dilation}"
            )
