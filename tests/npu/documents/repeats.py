"""Write docs/reports/npu_repeats.md: how often the compilers make the same of the same kernel.

    python tests/npu/documents/repeats.py [KERNEL ...]

runs in the environment of triton-ascend. With a KERNEL it prints what it finds of those that
contain the name, and writes nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

from launches import plain_launches
from lower import lower
from plan import compile_anew, read
from report import table
from toolchain import COMPILERS, HERE, UB_BYTES, VECTOR_CORES

DOCUMENT = HERE.parents[1] / "docs" / "reports" / "npu_repeats.md"
TIMES = 3

INTRODUCTION = f"""\
# What the Ascend compilers make of the same kernel

Written by `make repeat-npu`, which is no part of CI. **Nothing here has run on a device.** Each
kernel's launch in bfloat16, at the middle of the shapes of its calls without options, is compiled
{TIMES} times by each version, for an Ascend910B4. What must agree are the bytes of the Unified
Buffer that are used, and the operations: how many there are of each, with its types. Left out are
their order, the names of values, where buffers are placed, and the operations that synchronise
pipes, which are compared by themselves.
"""
SYNCHRONISES = re.compile(r"hivm\.hir\.(set_flag|wait_flag|pipe_barrier|sync_\w+)")
# Where buffers are placed, and the integers of which these places are some.
PLACES = re.compile(r"hivm\.hir\.pointer_cast|(arith|llvm\.mlir)\.constant")
NAMES = re.compile(r"[%^][\w#]+(:\d+)?")


class Code(NamedTuple):
    """The final code of a kernel: all of it, its operations, those that synchronise, and the bytes
    of the Unified Buffer."""

    text: str
    operations: Counter[str]
    synchronising: Counter[str]
    ub_bytes: int


class Repeated(NamedTuple):
    """The codes that a version makes of a kernel. `differing` are the operations of which
    there are not as many each time."""

    kernel: str
    version: str
    codes: list[Code]

    def agree(self, part: str) -> bool:
        return all(getattr(code, part) == getattr(self.codes[0], part) for code in self.codes)

    @property
    def differing(self) -> list[str]:
        first, *others = (code.operations for code in self.codes)
        found = {name: None for other in others for name in (first - other) + (other - first)}
        return list(found)


def code_of(text: str) -> Code:
    operations: Counter[str] = Counter()
    synchronising: Counter[str] = Counter()
    for line in map(str.strip, text.splitlines()):
        if SYNCHRONISES.search(line):
            synchronising[NAMES.sub("%", line)] += 1
        elif not PLACES.search(line):
            operations[NAMES.sub("%", line)] += 1
    return Code(text, operations, synchronising, read(text, "").ub_bytes)


def repeated(names: Sequence[str]) -> list[Repeated]:
    """Compile one launch of each kernel several times by each version."""
    by_kernel = {
        kernel: [launch for _, launch in launches.values()]
        for kernel, launches in plain_launches(VECTOR_CORES, UB_BYTES).items()
        if not names or any(name in kernel for name in names)
    }

    def compile_all(work: tuple[str, str]) -> Repeated:
        kernel, version = work
        launches = by_kernel[kernel]
        mlir = lower(launches[len(launches) // 2]).mlir
        codes = [code_of(compile_anew(mlir, version)[0]) for _ in range(TIMES)]
        return Repeated(kernel, version, codes)

    # Each thread waits for a compiler.
    with ThreadPool(os.cpu_count()) as pool:
        work = [(kernel, version) for kernel in by_kernel for version in COMPILERS]
        return pool.map(compile_all, work, chunksize=1)


def sections(results: Sequence[Repeated]) -> Iterator[str]:
    parts = ("text", "ub_bytes", "operations", "synchronising")
    rows = []
    for version, name in COMPILERS.items():
        of_version = [result for result in results if result.version == version]
        agreeing = (sum(result.agree(part) for result in of_version) for part in parts)
        rows.append([name, len(of_version), *agreeing])
    names = ["compiler", "kernels", "the same code", "bytes agree", "operations", "synchronisation"]
    yield from table(names, rows)
    differing = [result for result in results if result.differing]
    if differing:
        yield "\nKernels whose operations differ, and one of these:\n"
        yield from table(
            ["kernel", "compiler", "operations that differ", "the first"],
            (
                [
                    f"`{result.kernel.strip('_')}`",
                    COMPILERS[result.version],
                    len(result.differing),
                    f"`{result.differing[0][:90]}`".replace("|", " "),
                ]
                for result in differing
            ),
        )


def main(*names: str) -> None:
    text = "\n".join(sections(repeated(names)))
    if names:
        print(text)
        return
    DOCUMENT.write_text(f"{INTRODUCTION}\n{text}\n")
    print(f"== wrote {DOCUMENT}")


if __name__ == "__main__":
    main(*sys.argv[1:])
