"""Record the launches that the npu host code makes on CPU tensors, specialised as triton-ascend
specialises them on a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.ascend.compiler import AscendBackend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from launch_cases import BF16, LaunchCase, launched
from liger_ops import library
from toolchain import ARCH, UB_BYTES, VECTOR_CORES

BACKEND = AscendBackend(GPUTarget("npu", ARCH, 0))


@dataclass(frozen=True)
class Launch:
    """A kernel specialised for its arguments, and the arguments that are left at run time."""

    source: ASTSource
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]

    @property
    def kernel(self) -> str:
        return self.source.fn.__name__

    @property
    def tile(self) -> tuple[int, int]:
        constants = self.source.constants
        return constants.get("BLOCK_M", 1), constants.get("BLOCK_N", 1)

    @property
    def key(self) -> str:
        """The key of the code; launches that run the same code have the same key."""
        return f"{self.kernel} {self.source.hash()}"


@dataclass(frozen=True)
class Call:
    """One call of an op's npu kernel, and its launches."""

    op: str
    case: LaunchCase
    backward: bool
    launches: tuple[Launch, ...]

    @property
    def label(self) -> str:
        return f"{self.case.op.id}{'_backward' * self.backward} {self.case.label}"


class _Pointer:
    """Stands for a fake tensor, which has no address, in a specialisation; it is aligned."""

    def __init__(self, tensor: FakeTensor) -> None:
        self.dtype = tensor.dtype
        self.address = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.address


def _specialised_as(value: Any) -> Any:
    """Return a value as the binder can take it: a fake tensor as a `_Pointer`."""
    return _Pointer(value) if isinstance(value, FakeTensor) else value


def specialised(
    kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> Launch:
    """Specialise a kernel for its arguments, as triton-ascend's `JITFunction.run` does."""
    args = tuple(map(_specialised_as, args))
    options = {name: _specialised_as(value) for name, value in options.items()}
    if kernel.binder is None:
        kernel.create_binder(BACKEND)
    bound, types, _, arguments, _ = kernel.binder(*args, **options)
    names = [kernel.params[i].name for i in kernel.non_constexpr_indices]
    # The binder returns the keys of the specialisation behind the types. A pointer that is None
    # needs a type too.
    typed = zip(names, types[: len(names)], strict=True)
    signature = {name: "*i8" if type == "none" else type for name, type in typed}
    values = tuple(bound.values())
    attributes = BACKEND.get_attrs_descriptor(kernel.params, values)
    folded = attributes.get_constants()
    constants = {
        parameter.name: value
        for value, parameter in zip(values, kernel.params, strict=True)
        if parameter.is_constexpr or parameter.num in folded or value is None
    }
    left = (value for name, value in zip(names, arguments, strict=True) if name not in constants)
    return Launch(ASTSource(kernel, signature, constants, attributes), tuple(grid), tuple(left))


@contextmanager
def intercepted(launched: Callable[[Launch], None]) -> Iterator[None]:
    """Call `launched` with every `kernel[grid](...)`, which then does not run."""
    run = JITFunction.run

    def intercept(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched(specialised(kernel, grid, args, options))

    JITFunction.run = intercept
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def machine(cores: int, ub_bytes: int = UB_BYTES) -> Iterator[None]:
    """Tell the host code that the device has `cores` vector cores, with a Unified Buffer each."""
    variables = {"LIGER_OPS_NPU_UB_BYTES": str(ub_bytes), "LIGER_OPS_NPU_VECTOR_CORES": str(cores)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def npu_ops() -> dict[Any, str]:
    """Map the host code of every npu kernel to the name of its op."""
    return {op.kernels["npu"]: name for name, op in library.OPS.items() if "npu" in op.kernels}


@functools.cache
def calls() -> tuple[Call, ...]:
    """Record the calls of every case of the table, forward and backward."""
    return tuple(calls_of(launched()))


def calls_of(
    cases: Iterable[LaunchCase], cores: int = VECTOR_CORES, ub_bytes: int = UB_BYTES
) -> Iterator[Call]:
    """Yield the calls of cases, forward and backward, on a device with these cores and buffers."""
    # Fake tensors have no memory: the huge shapes cost nothing.
    names = npu_ops()
    for case in cases:
        for backward in case.directions:
            launches: list[Launch] = []
            with machine(cores, ub_bytes), intercepted(launches.append), FakeTensorMode():
                tensors = case.op.tensors(case.case)
                kernel = case.op.kernel("npu", backward)
                args = case.op.backward_args if backward else case.op.forward_args
                kernel(*args(case.case, tensors))
            yield Call(names[kernel], case, backward, tuple(launches))


def plain_launches(cores: int, ub_bytes: int) -> dict[str, dict[str, tuple[str, Launch]]]:
    """Return the launches of each kernel in bfloat16 and without options, by their keys, with the
    label of the first call that has one."""
    found: dict[str, dict[str, tuple[str, Launch]]] = {}
    cases = (case for case in launched() if case.plain and case.case.dtype is BF16)
    for call in calls_of(cases, cores, ub_bytes):
        for launch in call.launches:
            found.setdefault(launch.kernel, {}).setdefault(launch.key, (call.label, launch))
    return found
