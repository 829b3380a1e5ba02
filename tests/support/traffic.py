"""Count the bytes that kernels load from and store to global memory, under Triton's interpreter.

    TRITON_INTERPRET=1 python tests/support/traffic.py

prints how many times each npu kernel of npu.md moves its tensors, and fails if one moves them
too often. The test of the cuda kernels is tests/lowering/test_traffic.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import paths  # noqa: F401
from launch_cases import LaunchCase, counted
from op_checks import as_tuple
from op_under_test import Case, OpUnderTest

# Every kernel that is not in EXCEPTIONS reads rows of up to this many elements once.
READ_ONCE = 4096
# Op, whether backward -> the elements of the longest row of bfloat16 that an npu kernel reads once,
# because it keeps the row in its own dtype. Rows of float32 are half as long.
KEPT = {
    ("rms_norm", False): 16384, ("rms_norm", True): 8192, ("fused_add_rms_norm", False): 16384,
    ("fused_add_rms_norm", True): 8192, ("layer_norm", False): 16384, ("layer_norm", True): 8192,
    ("softmax", False): 32768, ("softmax", True): 16384, ("log_softmax", False): 32768,
    ("log_softmax", True): 16384,
}  # fmt: skip
# Op -> the longest row of which its backward npu kernel keeps x, and reads dy twice.
X_KEPT = {"rms_norm": 16384, "fused_add_rms_norm": 16384}
# Device, op, whether backward -> the reason for which rows are read twice.
EXCEPTIONS = {
    ("npu", "gated_rms_norm", True): "1024 elements take 48% of the Unified Buffer",
    ("npu", "divergence_forward", False): "2048 elements take 93.2% of the Unified Buffer",
}
# The share by which two passes over a row may exceed two reads: kernels that subtract a mean read a
# row's first tile before the first pass, to sum squares about its mean.
FIRST_TILE = 0.14
# Single numbers of a row, such as a statistic, may be read again, or be left to PyTorch.
ROUNDING = 0.01


@dataclass(frozen=True)
class Traffic:
    """The bytes of a call.

    moved: Those moved of the tensors with rows, whose first dimension is the case's.
    inputs, outputs: Those that these tensors hold.
    other: Those moved of weights, tables, and memory that the host code allocates between kernels.
    """

    moved: int
    inputs: int
    outputs: int
    other: int

    @property
    def ratio(self) -> float:
        """The number of times that the tensors with rows cross the memory bus; the least is 1."""
        return self.moved / (self.inputs + self.outputs)

    @property
    def two_passes(self) -> float:
        """The ratio of a kernel that reads every input twice."""
        return (2 * self.inputs + self.outputs) / (self.inputs + self.outputs)


# The address of an access's first element, and its bytes.
Access = tuple[int, int]


@contextmanager
def accesses() -> Iterator[list[Access]]:
    """List every access to global memory, without the bytes that its mask excludes."""
    listed: list[Access] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if addresses.size:
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            listed.append((int(addresses.min()), addresses.size * itemsize))

    def noting_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        note(ptrs, mask)
        return load(self, ptrs, mask, *args)

    def noting_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        note(ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    InterpreterBuilder.create_masked_load = noting_load
    InterpreterBuilder.create_masked_store = noting_store
    try:
        yield listed
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store


def traffic(op: OpUnderTest, folder: str, backward: bool, case: Case) -> Traffic:
    """Count the traffic of the kernels of one call with contiguous tensors."""
    args = (op.backward_args if backward else op.forward_args)(case, op.tensors(case))
    with accesses() as listed:
        results = as_tuple(op.kernel(folder, backward)(*args))
    inputs, outputs = (
        [value for value in values if isinstance(value, Tensor) and has_rows(value, case)]
        for values in (args, results)
    )
    of_rows = np.array([extent(tensor) for tensor in (*inputs, *outputs)])
    moved = other = 0
    for address, count in listed:
        if ((of_rows[:, 0] <= address) & (address < of_rows[:, 1])).any():
            moved += count
        else:
            other += count
    return Traffic(moved, sum(map(nbytes, inputs)), sum(map(nbytes, outputs)), other)


def has_rows(tensor: Tensor, case: Case) -> bool:
    return tensor.shape[:1] == case.shape[:1]


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + nbytes(tensor)


def reduced_together(case: LaunchCase) -> int:
    """Return the number of elements in a row, or in a group."""
    return torch.Size(case.case.shape[1:]).numel() // getattr(case.case, "num_groups", 1)


def excess(case: LaunchCase, folder: str, backward: bool, found: Traffic) -> str:
    """Return a sentence if a call moves less than its tensors, or more than it may; else ''."""
    length, op = reduced_together(case), case.op.name
    once, x_kept = READ_ONCE, 0
    if folder == "npu":
        once = max(once, KEPT.get((op, backward), 0) * 2 // case.case.dtype.itemsize)
        x_kept = backward * X_KEPT.get(op, 0) * 2 // case.case.dtype.itemsize
    if (case.op.elementwise or length <= once) and (folder, op, backward) not in EXCEPTIONS:
        most = 1 + ROUNDING
    elif length <= x_kept:
        # dy is as large as dx.
        most = 1 + found.outputs / (found.inputs + found.outputs) + ROUNDING
    else:
        most = found.two_passes + (ROUNDING if folder == "npu" else FIRST_TILE)
    if 1 - ROUNDING < found.ratio <= most:
        return ""
    name = f"{case.op.id}{'_backward' * backward} {case.label}"
    return f"{folder} {name}: moves its tensors {found.ratio:.3f} times, and may {most:.3f} times"


def of_npu(case: tuple[int, bool]) -> tuple[str, float, str]:
    """Return the name, the ratio and the excess of a case of npu.md.

    case: Its index in `counted`, and whether it is backward.
    """
    i, backward = case
    planned, few = list(counted())[i]
    name = f"{few.op.id}{'_backward' * backward} {planned.label}"
    result = traffic(few.op, "npu", backward, few.case)
    return name, result.ratio, excess(few, "npu", backward, result)


def main() -> int:
    """Print the ratio of every case of npu.md as JSON, by op, direction and label.

    Print cases that move too much on the standard error; return 1 if there are any.
    """
    cases = product(range(len(list(counted()))), (False, True))
    with Pool() as pool:
        results = pool.map(of_npu, cases, chunksize=1)
    print(json.dumps({name: ratio for name, ratio, _ in results}, indent=1))
    problems = [problem for _, _, problem in results if problem]
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
