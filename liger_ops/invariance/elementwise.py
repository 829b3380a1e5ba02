"""Elementwise operators on a CPU, with the same bits for an element at any place.

A CPU computes the elements that do not fill a vector by other code: with torch 2.13 the last few
elements of a tensor can have other bits in sigmoid, silu, gelu, softplus and pow. So the elements
are completed to whole vectors, but for operators that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .products import is_rounded
from .rows import Base, Results, aligned, compute, described, names_of

# Those that PyTorch does not tag as elementwise.
UNTAGGED = (
    "softplus_backward", "elu_backward", "mish_backward", "hardswish", "hardswish_backward",
    "hardsigmoid_backward", "log_sigmoid_forward", "log_sigmoid_backward", "leaky_relu_backward",
)  # fmt: skip
# Operators with one right result, by the names of their packets, and one with a memory format.
LEFT_OUT = {
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "copysign", "eq", "floor", "fmax", "fmin", "frac", "ge", "gt",
    "hardshrink", "hardtanh", "isinf", "isnan", "isneginf", "isposinf", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum",
    "nan_to_num", "ne", "neg", "nextafter", "relu", "round", "sign", "signbit",
    "threshold", "threshold_backward", "trunc", "where",
}  # fmt: skip
# Those that have one for real numbers, the last three if they do not multiply by a number first.
OF_REALS = {"abs", "div", "mul", "reciprocal", "sgn", "sqrt", "add", "sub", "rsub"}
# Below this many elements PyTorch does not divide a tensor among threads, at any place of a vector.
PIECE = 2**14
# A multiple of the elements of any CPU's vectors, and of how many of them a loop takes.
EVEN = 128


def operators() -> Iterator[str]:
    """Yield the names of the elementwise operators of ATen that return new tensors."""
    yield from UNTAGGED
    for packet in dir(torch.ops.aten):
        for which in getattr(getattr(torch.ops.aten, packet), "overloads", list)():
            overload = getattr(getattr(torch.ops.aten, packet), which)
            is_random = torch.Tag.nondeterministic_seeded in overload.tags
            if torch.Tag.pointwise not in overload.tags or is_random or packet in LEFT_OUT:
                continue
            returns = [str(result.type) for result in overload._schema.returns]
            if not overload._schema.is_mutable and set(returns) == {"Tensor"}:
                yield packet if which == "default" else f"{packet}.{which}"


def by_elements(overload: Any, base: Base, *args: Any, **options: Any) -> Any:
    """Compute on a CPU with whole vectors of elements."""
    names = names_of(overload)
    given = dict(zip(names, args, strict=False)) | options
    # Tensors without axes take another part in the promotion of dtypes.
    of_elements = [
        name for name, value in given.items() if isinstance(value, Tensor) and value.dim()
    ]
    tensors = [given[name] for name in of_elements]
    is_exact = overload.overloadpacket.__name__ in OF_REALS and given.get("alpha", 1) == 1
    if not any(x.is_complex() or (is_rounded(x) and not is_exact) for x in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    if 0 in shape:
        return NotImplemented

    def function(*elements: Tensor) -> Results:
        results = base(**given | dict(zip(of_elements, elements, strict=True)))
        return results if isinstance(results, tuple) else (results,)

    rest = (item for item in given.items() if item[0] not in of_elements)
    key = (base.out_dtype, *((name, described(value)) for name, value in rest))
    elements = (aligned(x.expand(shape)).reshape(-1) for x in tensors)
    results = compute(str(overload), key, [function], *elements, by=(pieces,))
    shaped = tuple(result.reshape(shape) for result in results)
    return shaped if len(overload._schema.returns) > 1 else shaped[0]


def pieces(function: Callable[..., Results], *elements: Tensor) -> Results:
    """Call a function with PIECE elements at a time, and the last with a multiple of EVEN."""
    count = elements[0].shape[0]
    parts = []
    for first in range(0, count, PIECE):
        part = [x[first : first + PIECE] for x in elements]
        size = part[0].shape[0]
        if missing := -size % EVEN:
            part = [torch.cat((x, x[:1].expand(missing))) for x in part]
        parts.append(tuple(result[:size] for result in function(*part)))
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
