"""neighborhood_attention: the heads, and the windows of positions."""

from __future__ import annotations

from typing import Any

from ...ops.attention.windows import per_dimension
from .. import checks
from ..lines import also, gives

MOST_COLUMNS = 256

gives("like", "neighborhood_attention")(checks.in_layout_of)


@also("neighborhood_attention")
def heads(call: Any) -> None:
    op, shape, key_heads = checks.op(call), tuple(call.query.shape), call.key.shape[1]
    if len(shape) not in (4, 5):
        raise ValueError(f"{op}: query must have one or two spatial dimensions, got shape {shape}")
    if not 1 <= shape[-1] <= MOST_COLUMNS:
        raise ValueError(
            f"{op}: query must have from 1 to {MOST_COLUMNS} elements in its last dimension,"
            f" got {shape[-1]}"
        )
    if key_heads < 1 or shape[1] % key_heads != 0:
        raise ValueError(
            f"{op}: the heads of key must divide the {shape[1]} of query, got {key_heads}"
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
