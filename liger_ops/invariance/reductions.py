"""PyTorch's sums, means, norms and softmaxes along some axes, with the same bits in every batch.

The axes before the first that is summed count rows: a sum along the first axis itself is one over
rows, and computed as it is. PyTorch's softmaxes and layer_norm gave a row the same bits among any
number of rows on an H200 (torch 2.11, 64 to 151936 columns); its sums, means, variances and norms
of float32 did not below 17 rows, or anywhere for 151936 columns, nor did its cumulative sums.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import is_rounded
from .rows import Base, Results, aligned, compute, described, names_of


def along_axes(overload: Any, base: Base, *args: Any, **options: Any) -> Any:
    """Compute along axes behind the first, as a function of the rows before them."""
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

    def with_even_strides(*rows: Tensor) -> Results:
        return function(*map(_with_even_strides, rows))

    functions = [function, with_even_strides]
    own = OWN.get(overload.name())
    if own is not None and len(x.shape) == first + 1 and x.device.type != "cpu":
        # half_to_float and input_dtype say what the result is.
        wide = torch.float32 if rest.get("half_to_float") else rest.get("input_dtype", x.dtype)
        functions[1] = functools.partial(_by_own_op, own, wide)
    options_of = ((name, described(rest[name])) for name in rest if name not in of_rows)
    key = (base.out_dtype, *options_of)
    rows = (aligned(given[name].reshape(-1, *x.shape[first:])) for name in of_rows)
    results = compute(str(overload), key, functions, *rows)
    shaped = tuple(result.reshape(*x.shape[:first], *result.shape[1:]) for result in results)
    return shaped if len(overload._schema.returns) > 1 else shaped[0]


# Operators along the last axis, and the ops of this package that compute the same.
OWN = {
    "aten::_softmax": "softmax",
    "aten::_log_softmax": "log_softmax",
    "aten::_softmax_backward_data": "softmax_backward",
    "aten::_log_softmax_backward_data": "log_softmax_backward",
}


def _by_own_op(name: str, dtype: Any, *rows: Tensor) -> Results:
    return (getattr(torch.ops.liger, name)(*(x.to(dtype) for x in rows)),)


def _with_even_strides(x: Tensor) -> Tensor:
    """Return x with rows that each begin at an address of 16 bytes, whatever their length."""
    even = 16 // x.element_size()
    return F.pad(x, (0, -x.shape[-1] % even))[..., : x.shape[-1]]


def same_shape(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == x.shape and value.dim() > 0


def layer_norm(overload: Any, base: Base, x: Tensor, shape: Any, *args: Any) -> Any:
    """Compute over the last axes, as a function of the rows before them."""
    axes = x.dim() - len(shape)
    if x.numel() == 0 or axes == 0:
        return NotImplemented
    rows = aligned(x.reshape(-1, *x.shape[axes:]))
    key = tuple(described(value) for value in (shape, *args))
    results = compute(str(overload), key, [lambda x: base(x, shape, *args)], rows)
    return tuple(result.reshape(*x.shape[:axes], *result.shape[1:]) for result in results)


def layer_norm_backward(overload: Any, base: Base, *args: Any) -> Any:
    """Compute the gradient of the input as a function of its rows.

    Those of weight and bias are sums over rows.
    """
    given = dict(zip(names_of(overload), args, strict=True))
    x: Tensor = given["input"]
    masks: list[bool] = list(given["output_mask"])
    axes = x.dim() - len(given["normalized_shape"])
    if x.numel() == 0 or axes == 0 or not masks[0]:
        return NotImplemented
    of_rows = [name for name in ("grad_out", "input", "mean", "rstd") if name in given]
    alone = given | {"output_mask": [True, *(False for _ in masks[1:])]}

    def function(*rows: Tensor) -> Results:
        return (base(*(alone | dict(zip(of_rows, rows, strict=True))).values())[0],)

    key = tuple(described(value) for name, value in alone.items() if name not in of_rows)
    rows = (aligned(given[name].reshape(-1, *given[name].shape[axes:])) for name in of_rows)
    (dx,) = compute(str(overload), key, [function], *rows)
    others = base(*(given | {"output_mask": [False, *masks[1:]]}).values())[1:]
    return (dx.reshape(x.shape), *others)
