"""Refuse arguments that no op takes: None for a required tensor, and tensors that are not dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .record import Op
from .torch_private import NestedTensor

# The keys of nested tensors, which no op takes. PyTorch's own error is long and names no op.
NESTED_KEYS = ("NestedTensorCPU", "NestedTensorCUDA", "NestedTensorPrivateUse1")


def refusal(name: str, schema: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], None]:
    """Return a function of the positional and keyword arguments of op `name` that raises TypeError
    for the first tensor argument that no op takes."""
    # Users call the op without `_forward` in its name.
    name = name.removesuffix("_forward")
    tensors = [
        (i, argument.name, str(argument.type) == "Tensor")
        for i, argument in enumerate(schema.arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    ]

    def refuse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for i, argument, is_needed in tensors:
            value = args[i] if i < len(args) else kwargs.get(argument)
            if value is None:
                if is_needed:
                    raise TypeError(f"{name}: {argument} must be a tensor, got None")
            elif isinstance(value, Tensor):
                kind = "a nested tensor" if value.is_nested else "a tensor"
                if value.is_nested or value.layout is not torch.strided:
                    raise TypeError(
                        f"{name}: {argument} must be a dense tensor, of layout torch.strided,"
                        f" got {kind} of layout {value.layout}"
                    )

    return refuse


def refuse_nested(op: Op) -> None:
    """Refuse nested tensors, which would not reach the op's checks."""

    def refuse(cls: Any, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        op.refuse(args, kwargs or {})
        return NotImplemented

    op.custom_op.register_torch_dispatch(NestedTensor, refuse)
    for key in NESTED_KEYS:
        op.custom_op._lib.impl(op.name, op.check_and_define, key)
