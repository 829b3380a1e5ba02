"""Cases with which the npu kernels are lowered, planned and run, their traffic is counted, and the
cuda kernels are compiled, from the forms of every op's entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from launch_forms import BF16, DTYPES, FP32, Fields
from op_table import OPS
from op_under_test import Case, OpUnderTest


@dataclass(frozen=True)
class LaunchCase:
    op: OpUnderTest
    case: Case
    label: str
    directions: tuple[bool, ...] = (False, True)
    # Whether it is one of `shapes` without options.
    plain: bool = True


def _case(op: OpUnderTest, dtype: torch.dtype, form: Fields) -> Any:
    return replace(op.sample(dtype), **{**op.forms.common, **form})


def _launch_case(op: OpUnderTest, dtype: torch.dtype, form: Fields, *more: Any) -> LaunchCase:
    shape = "x".join(map(str, form["shape"]))
    options = (f"{k}={DTYPES.get(v, v)}" for k, v in form.items() if k != "shape")
    label = " ".join([DTYPES[dtype], shape, *options]).replace(", ", ",")
    return LaunchCase(op, _case(op, dtype, form), label, *more)


def _taken(op: OpUnderTest, shapes: Sequence[Fields], optional: Sequence[int]) -> Iterator[Any]:
    """The shapes in every dtype, then those of `optional` with each option."""
    forward = (True,) if op.is_pytorchs_forward else (False, True)
    for dtype in DTYPES:
        for shape in shapes:
            yield _launch_case(op, dtype, shape, forward)
    for shape in (shapes[i] for i in optional if shapes):
        for dtype in (BF16, FP32):
            for option in op.forms.options:
                yield _launch_case(op, dtype, {**shape, **option}, forward, False)
            for option in op.forms.backward_options:
                yield _launch_case(op, dtype, {**shape, **option}, (True,), False)


def launched() -> Iterator[LaunchCase]:
    """The cases to lower and plan."""
    for op in OPS.values():
        yield from _taken(op, op.forms.shapes, op.forms.optional_at)


def executed() -> Iterator[LaunchCase]:
    """The cases to run."""
    for op in OPS.values():
        yield from _taken(op, op.forms.executed, (0,))


def counted() -> Iterator[tuple[LaunchCase, LaunchCase]]:
    """The cases of npu.md in bfloat16: as planned, and with the rows for counting traffic."""
    for op in OPS.values():
        for i, fewer in op.forms.counted.items():
            planned = op.forms.shapes[i]
            yield _launch_case(op, BF16, planned), _launch_case(op, BF16, {**planned, **fewer})


def compiled() -> Iterator[tuple[OpUnderTest, Case]]:
    """The cases with which cuda kernels are compiled."""
    for op in OPS.values():
        for form in op.compiled:
            for dtype in (FP32, BF16):
                yield op, _case(op, dtype, form)
