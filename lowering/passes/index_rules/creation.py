"""What makes a tensor from nothing but its sizes."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..index_algebra import Value, affine, index
from ..index_function import IndexFunctions, accept, rule, size


@rule("arange")
def _arange(of: IndexFunctions, node: fx.Node, *ends: Any, **options: Any) -> Value:
    accept(options, "dtype", "start", "end", "step")
    given = dict(zip(("start", "end", "step"), ends if len(ends) > 1 else (0, *ends), strict=False))
    given.update({name: options[name] for name in ("start", "end", "step") if name in options})
    step = size(given.get("step", 1))
    return affine(size(given["start"])) + index(-1).times(step)


@rule("ones", "new_ones", "ones_like")
def _ones(of: IndexFunctions, node: fx.Node, *shape: Any, **options: Any) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(1)


@rule("zeros", "new_zeros", "zeros_like")
def _zeros(of: IndexFunctions, node: fx.Node, *shape: Any, **options: Any) -> Value:
    accept(options, "dtype", "size", "memory_format")
    return affine(0)


@rule("full", "full_like")
def _full(of: IndexFunctions, node: fx.Node, shape: Any, fill_value: Any, **options: Any) -> Value:
    accept(options, "dtype", "memory_format")
    return of.shaped(fill_value, ())


@rule("new_full")
def _new_full(
    of: IndexFunctions, node: fx.Node, like: Any, size: Any, fill_value: Any, **options: Any
) -> Value:
    accept(options, "dtype")
    return of.shaped(fill_value, ())


@rule("tensor", "scalar_tensor")
def _tensor(of: IndexFunctions, node: fx.Node, data: Any, **options: Any) -> Value:
    accept(options, "dtype")
    return of.shaped(data, ())
