"""Casts, and copies on another device or in another layout of memory ("copy")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import IDENTITY, METHODS, Call, spelled, value


def _cast(input: Any, dtype: Any) -> Call | None:
    dtype, tensor = value(dtype), value(input)
    if not isinstance(dtype, torch.dtype):
        return None
    if isinstance(tensor, Tensor) and tensor.dtype == dtype:
        return Call(IDENTITY, (input,))
    return Call("cast", (input, dtype))


@spelled(torch.Tensor.to, "to")
def _to(input: Any, *args: Any, **kwargs: Any) -> Call | None:
    memory_format = kwargs.pop("memory_format", None)
    kwargs.pop("non_blocking", None)
    kwargs.pop("copy", None)
    dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
    if kwargs:
        return None
    for argument in args:
        example = value(argument)
        if isinstance(example, Tensor):
            dtype, device = example.dtype, example.device
        elif isinstance(example, torch.dtype):
            dtype = example
        elif isinstance(example, (str, torch.device)):
            device = example
    tensor = value(input)
    if device is not None:
        device = torch.device(value(device))
        if not isinstance(tensor, Tensor):
            return None
        if not _same_device(tensor.device, device):
            return _copy(input)
    if memory_format is not None:
        return _copy(input)
    return Call(IDENTITY, (input,)) if dtype is None else _cast(input, dtype)


def _same_device(a: torch.device, b: torch.device) -> bool:
    # "cuda" without an index is the current device, where the tensor was while it was traced.
    return a.type == b.type and (a.index == b.index or b.index is None)


@spelled("type_as")
def _type_as(input: Any, other: Any) -> Call | None:
    tensor, like = value(input), value(other)
    if not isinstance(tensor, Tensor):
        return None
    return _cast(input, like.dtype) if tensor.device == like.device else _copy(input)


@spelled("type")
def _type(input: Any, dtype: Any) -> Call | None:
    # The name of a type, "torch.LongTensor", may be that of another device.
    return _cast(input, dtype) or _copy(input)


@spelled("cuda", "cpu")
def _copy(input: Any, *args: Any, **kwargs: Any) -> Call:
    return Call("copy", (input,))


for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("long", torch.int64),
    ("int", torch.int32),
    ("short", torch.int16),
    ("char", torch.int8),
    ("byte", torch.uint8),
    ("bool", torch.bool),
):
    METHODS[_name] = lambda input, dtype=_dtype: _cast(input, dtype)
