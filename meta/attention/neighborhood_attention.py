"""neighborhood_attention: checks and outputs."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ... import library
from ...ops.attention.windows import BORDERS, per_dimension
from .. import checks

MOST_COLUMNS = 256


@library.fake("neighborhood_attention_forward")
def neighborhood_attention_forward(call: Any) -> tuple[Tensor, Tensor]:
    _check(call)
    lse = call.query.new_empty(call.query.shape[:-1], dtype=checks.wide(call.query))
    return checks.in_layout_of(call.query), lse


@library.fake("neighborhood_attention_backward")
def neighborhood_attention_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check(call)
    checks.same_form(call, "query", "dy", "y")
    checks.floating(call, "dlse", "lse")
    checks.same_device(call, "query", "dlse", "lse")
    for name in ("dlse", "lse"):
        checks.shape(call, name, call.query.shape[:-1], "query but for its last dimension")
    return checks.gradients(call, "query", "key", "value", allocate=checks.in_layout_of)


def _check(call: Any) -> None:
    op, query, key = checks.op(call), call.query, call.key
    checks.floating(call, "query", "key", "value")
    for name in ("key", "value"):
        dtype = getattr(call, name).dtype
        if dtype != query.dtype:
            raise TypeError(f"{op}: {name} must have query's dtype, {query.dtype}, got {dtype}")
    shape = tuple(query.shape)
    if len(shape) not in (4, 5):
        raise ValueError(f"{op}: query must be (B, H, L, D) or (B, H, Y, X, D), got shape {shape}")
    if not 1 <= shape[-1] <= MOST_COLUMNS:
        raise ValueError(
            f"{op}: query must have from 1 to {MOST_COLUMNS} elements in its last dimension,"
            f" got {shape[-1]}"
        )
    checks.same_device(call, "query", "key", "value")
    if key.dim() != len(shape) or key.shape[0] != shape[0] or key.shape[2:] != query.shape[2:]:
        raise ValueError(
            f"{op}: key must have the shape of query but for the heads,"
            f" {(shape[0], 'heads', *shape[2:])}, got {tuple(key.shape)}"
        )
    checks.shape(call, "value", key.shape, "key")
    if key.shape[1] < 1 or shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"{op}: the heads of key must divide the {shape[1]} of query, got {key.shape[1]}"
        )
    if call.scale is not None and not math.isfinite(call.scale):
        raise ValueError(f"{op}: scale must be a finite number, got {call.scale}")
    checks.choice(call, "border", BORDERS)
    _check_windows(call, shape[2:-1])


def _check_windows(call: Any, lengths: tuple[int, ...]) -> None:
    op, dims = checks.op(call), len(lengths)
    options = {}
    for name in ("kernel_size", "dilation", "is_causal"):
        options[name] = per_dimension(getattr(call, name), dims)
        if len(options[name]) != dims:
            raise ValueError(
                f"{op}: {name} must be one value or one for each of {dims} dimensions,"
                f" got {options[name]}"
            )
        if name == "is_causal":
            # Its type in the schema is that of a list of ints.
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
