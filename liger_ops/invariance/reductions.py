"""PyTorch's sums, means, norms and softmaxes along some axes, with the same bits in every batch.

The axes before the first that is summed count rows: a sum along the first axis itself is one over
rows, and computed as it is. PyTorch's softmaxes and layer_norm gave a row the same bits among any
number of rows on an H200 (torch 2.11, 64 to 151936 columns); its sums, means, variances and norms
of float32 did not below 17 rows, or anywhere for 151936 columns, nor did its cumulative sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .products import is_rounded
from .rows import Results, aligned, compute, described, names_of

Base = Callable[..., Any]


def along_axes(overload: Any, base: Base, *args: Any, **options: Any) -> Any:
    """Compute an operator of ATen that has an argument `dim`, of one axis or of several."""
    names = names_of(overload)
    given = dict(zip(names, args, strict=False)) | options
    x = args[0]
    # A gradient's arguments are the result's: these are rows as well.
    of_rows = [name for name in names if same_shape(given.get(name), x)]
    dim = given.get("dim")
    several = isinstance(dim, list | tuple)
    axes = sorted(axis % max(x.dim(), 1) for axis in (dim if several else [dim])) if dim else [0]
    if not is_rounded(x) or x.numel() == 0 or not axes or axes[0] == 0:
        return NotImplemented
    first = axes[0]
    moved = [axis - first + 1 for axis in axes]
    rest = given | {"dim": moved if several else moved[0]}

    def function(*rows: Tensor) -> Results:
        results = base(**rest | dict(zip(of_rows, rows, strict=True)))
        return results if isinstance(results, tuple) else (results,)

    key = tuple((name, described(rest[name])) for name in rest if name not in of_rows)
    rows = (aligned(given[name].reshape(-1, *x.shape[first:])) for name in of_rows)
    results = compute(str(overload), key, [function], *rows)
    shaped = tuple(result.reshape(*x.shape[:first], *result.shape[1:]) for result in results)
    return shaped if len(overload._schema.returns) > 1 else shaped[0]


def same_shape(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == x.shape and value.dim() > 0


def layer_norm(overload: Any, base: Base, x: Tensor, shape: Any, *args: Any) -> Any:
    """Compute native_layer_norm or _fused_rms_norm, whose last axes have the given shape."""
    axes = x.dim() - len(shape)
    if x.numel() == 0 or axes == 0:
        return NotImplemented
    rows = aligned(x.reshape(-1, *x.shape[axes:]))
    key = tuple(described(value) for value in (shape, *args))
    results = compute(str(overload), key, [lambda x: base(x, shape, *args)], rows)
    return tuple(
        result.reshape(*x.shape[:axes], *result.shape[1:]) for result in results
    )
