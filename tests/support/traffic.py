"""Count the bytes that kernels load from and store to global memory, under Triton's interpreter.

    TRITON_INTERPRET=1 python tests/support/traffic.py

prints how many times each npu kernel of docs/npu.md moves its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from launch_cases import counted
from op_checks import as_tuple
from op_under_test import Case, OpUnderTest


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call: moved and held by the tensors whose first dimension is the case's rows.
    `other` is the bytes moved of weights, tables, and memory that the host code allocates between
    kernels."""

    moved: int
    inputs: int
    outputs: int
    other: int

    @property
    def ratio(self) -> float:
        """Number of times that the row tensors cross the memory bus; the least is 1."""
        return self.moved / (self.inputs + self.outputs)

    @property
    def two_passes(self) -> float:
        """The ratio of a kernel that reads every input twice."""
        return (2 * self.inputs + self.outputs) / (self.inputs + self.outputs)


# The address of an access's first element, and its bytes.
Access = tuple[int, int]


@contextmanager
def accesses() -> Iterator[list[Access]]:
    """List every access, with the number of bytes that its mask does not exclude."""
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
    """The traffic of the kernels of one call with contiguous tensors."""
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


def npu_ratio(case: tuple[int, bool]) -> tuple[str, float]:
    """The name and the ratio of a case of docs/npu.md, given by its index in `counted` and its
    direction."""
    i, backward = case
    planned, few = list(counted())[i]
    name = f"{few.op.id}{'_backward' * backward} {planned.label}"
    return name, traffic(few.op, "npu", backward, few.case).ratio


def main() -> None:
    """Print the ratio of every case of docs/npu.md as JSON, by op, direction and label."""
    cases = product(range(len(list(counted()))), (False, True))
    with Pool() as pool:
        print(json.dumps(dict(pool.map(npu_ratio, cases, chunksize=1)), indent=1))


if __name__ == "__main__":
    main()
