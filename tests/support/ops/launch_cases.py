"""The cases in which kernels are launched for their code: to lower, plan and run npu kernels, to
count their traffic, and to compile cuda kernels. They follow from the forms of every op's entry."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from launch_forms import BF16, DTYPES, FP32, Fields
from op_table import OPS
from op_under_test import Case, OpUnderTest


@dataclass(frozen=True)
class LaunchCase:
    """A case of an op, its label, and its directions: False for forward, True for backward."""

    op: OpUnderTest
    case: Case
    label: str
    directions: tuple[bool, ...] = (False, True)
    # Whether the case is one of the entry's shapes, without options.
    plain: bool = True


def _case(op: OpUnderTest, dtype: torch.dtype, form: Fields) -> Any:
    return replace(op.sample(dtype), **{**op.forms.common, **form})


def launch_case(op: OpUnderTest, dtype: torch.dtype, form: Fields, *more: Any) -> LaunchCase:
    shape = "x".join(map(str, form["shape"]))
    options = (f"{k}={DTYPES.get(v, v)}" for k, v in form.items() if k != "shape")
    label = " ".join([DTYPES[dtype], shape, *options]).replace(", ", ",")
    return LaunchCase(op, _case(op, dtype, form), label, *more)


# The ids of the npu ops to lower, plan and run, with commas between them; empty for all.
PICKED = tuple(filter(None, os.environ.get("LIGER_OPS_NPU_OPS", "").split(",")))


def _picked() -> Iterator[OpUnderTest]:
    by_id = {op.id: op for op in OPS.values()}
    if unknown := [name for name in PICKED if name not in by_id]:
        raise ValueError(f"OPS has {unknown[0]!r}; there are {', '.join(by_id)}")
    yield from (by_id[name] for name in PICKED or by_id)


def _taken(op: OpUnderTest, shapes: Sequence[Fields], optional: Sequence[int]) -> Iterator[Any]:
    """Yield the shapes in every dtype, then the shapes at `optional` with each option."""
    forward = (True,) if op.is_pytorchs_forward else (False, True)
    for dtype in DTYPES:
        for shape in shapes:
            yield launch_case(op, dtype, shape, forward)
    for shape in (shapes[i] for i in optional if shapes):
        for dtype in (BF16, FP32):
            for option in op.forms.options:
                yield launch_case(op, dtype, {**shape, **option}, forward, False)
            for option in op.forms.backward_options:
                yield launch_case(op, dtype, {**shape, **option}, (True,), False)


def launched() -> Iterator[LaunchCase]:
    """Yield the cases to lower and plan."""
    for op in _picked():
        yield from _taken(op, op.forms.shapes, op.forms.optional_at)


def executed() -> Iterator[LaunchCase]:
    """Yield the cases to run."""
    for op in _picked():
        yield from _taken(op, op.forms.executed, (0,))


def counted() -> Iterator[tuple[LaunchCase, LaunchCase]]:
    """Yield the cases of npu.md in bfloat16: as planned, and with fewer rows to count traffic."""
    for op in _picked():
        for i, fewer in op.forms.counted.items():
            planned = op.forms.shapes[i]
            yield launch_case(op, BF16, planned), launch_case(op, BF16, {**planned, **fewer})


def compiled() -> Iterator[tuple[OpUnderTest, Case]]:
    """Yield the cases with which cuda kernels are compiled."""
    for op in OPS.values():
        for form in op.compiled:
            for dtype in (FP32, BF16):
                yield op, _case(op, dtype, form)
