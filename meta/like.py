"""Fakes of the ops whose result has the shape, dtype and device of an argument."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import library
from . import checks


def register(op: library.Op) -> None:
    tensors = [argument.name for argument in op.schema.arguments if "Tensor" in str(argument.type)]
    others = [name for name in tensors if name != op.like]

    @library.fake(op.name)
    def fake(call: Any) -> Tensor:
        checks.floating(call, op.like)
        checks.same_form(call, op.like, *others)
        return checks.like(getattr(call, op.like))


for op in library.OPS.values():
    if op.like:
        register(op)
