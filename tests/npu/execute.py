"""Run lowered code on the CPU: MLIR's own passes lower it to LLVM, clang compiles a shared object,
and the programs run one after the other."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from launches import Launch, intercepted, machine
from lower import lower
from toolchain import HERE, file_for, write

RUNTIME = HERE / "runtime.c"
# Few cores, so that every program walks several tiles.
CORES = 3

PASSES = (
    "--allow-unregistered-dialect",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--canonicalize",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--memref-expand",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
# No contraction: a multiplication and an addition round as on a device.
CLANG = ("-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off")

SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def _run(*command: Any) -> None:
    """Run a command. Raises: RuntimeError with its messages if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[:3000]}")


def shared_object(mlir: str) -> Path:
    """Compile lowered code for the CPU, or return the path of the result in the cache."""
    path = file_for("executable", "\n".join([*PASSES, *CLANG, RUNTIME.read_text(), mlir]), ".so")
    if path.exists():
        path.touch()
        return path
    # Remove the attributes and marks that only Ascend's compiler knows.
    mlir = re.sub(r', (mix_mode|parallel_mode) = "\w+"', "", mlir)
    mlir = re.sub(r"^\s*annotation\.mark .*$", "", mlir, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.mlir").write_text(mlir)
        _run("mlir-opt-19", folder / "kernel.mlir", *PASSES, "-o", folder / "llvm.mlir")
        _run(
            "mlir-translate-19",
            "--mlir-to-llvmir",
            folder / "llvm.mlir",
            "-o",
            folder / "kernel.ll",
        )
        _run("clang-19", *CLANG, folder / "kernel.ll", RUNTIME, "-lm", "-o", folder / "kernel.so")
        write(path, (folder / "kernel.so").read_bytes())
    return path


class Program:
    """A lowered kernel, loaded into this process."""

    def __init__(self, mlir: str) -> None:
        head = re.search(r"func\.func @(\w+)\((.*?)\) attributes", mlir, re.DOTALL)
        arguments = re.split(r",\s*(?=%arg)", re.sub(r"\{.*?\}", "", head[2]))
        types = [argument.split(": ", 1)[1].strip() for argument in arguments]
        # Two pointers to workspace come first; the grid and the program's index in it come last,
        # three numbers each.
        self.types = types[2:-6]
        self.library = ctypes.CDLL(str(shared_object(mlir)))
        self.function = getattr(self.library, head[1])
        self.function.restype = None

    def run(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Run the programs of the grid one after the other."""
        grid = (*grid, 1, 1)[:3]
        c_arguments = [*_memref(None), *_memref(None)]
        for type, argument in zip(self.types, arguments, strict=True):
            if type.startswith("memref"):
                c_arguments += _memref(argument)
            else:
                c_arguments.append(SCALARS[type](argument))
        c_arguments += map(ctypes.c_int32, grid)
        for program in itertools.product(*map(range, grid)):
            self.library.begin_program()
            self.function(*c_arguments, *map(ctypes.c_int32, program))


def _memref(tensor: torch.Tensor | None) -> list[Any]:
    """Return the fields of a memref of one dimension: two pointers, offset, size and stride."""
    if tensor is None:
        return [ctypes.c_void_p(0), ctypes.c_void_p(0), *map(ctypes.c_int64, (0, 0, 1))]
    pointer = ctypes.c_void_p(tensor.data_ptr())
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return [pointer, pointer, *map(ctypes.c_int64, (0, elements - tensor.storage_offset(), 1))]


_programs: dict[str, Program] = {}


@contextmanager
def executing(changed: Callable[[str], str] = lambda mlir: mlir) -> Iterator[list[Launch]]:
    """Run the lowered code of every launch, with `changed` applied to it, and list the launches."""
    launched: list[Launch] = []

    def execute(launch: Launch) -> None:
        lowered = lower(launch)
        if lowered.error:
            raise RuntimeError(f"{launch.kernel} does not lower: {lowered.error}")
        mlir = changed(lowered.mlir)
        program = _programs.get(mlir)
        if program is None:
            program = _programs[mlir] = Program(mlir)
        program.run(launch.grid, launch.arguments)
        launched.append(launch)

    with machine(CORES), intercepted(execute):
        yield launched
