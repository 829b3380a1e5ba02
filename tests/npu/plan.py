"""Run Ascend's own compiler on lowered code, and read from its result where it places every buffer,
and which loads it double-buffers.

bishengir-compile runs as on a device up to its last step, `hivmc`, which is CANN's and closed. The
script `hivmc` of this folder stands in for it, and keeps the code that it is given.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton.backends.ascend.compiler import NPUOptions

from toolchain import ARCH, HERE, UB_BYTES, cached, compiler

# The options with which triton-ascend calls the compiler.
DEFAULTS = NPUOptions()
TARGET = "--target="
ARGUMENTS = (
    f"{TARGET}{ARCH}",
    f"--enable-auto-multi-buffer={DEFAULTS.multibuffer}",
    f"--enable-auto-bind-sub-block={DEFAULTS.enable_auto_bind_sub_block}",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)

# A buffer takes whole blocks of this many bytes.
BLOCK = 32
BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64}
# A buffer of at most this many elements holds one number of each row, such as a statistic, and need
# not be double-buffered.
FEW = 64


@dataclass(frozen=True)
class Planned:
    """The memory plan of one compiled kernel, or the reason why it did not compile."""

    ub_bytes: int
    # The bits of Unified Buffer that the compiler's message asks for, 0 if the kernel fits.
    overflow_bits: int
    # Whether the compiler gave up double buffering, or moving code, to make the kernel fit.
    fell_back: bool
    # Lines of code that access a buffer element by element within a loop.
    scalarised: list[str]
    loads_in_loops: int
    # Loads within a loop into a buffer that is not one of a pair.
    single_buffered: list[str]
    error: str

    @property
    def share(self) -> float:
        """The share of the Unified Buffer that the kernel takes."""
        return self.ub_bytes / UB_BYTES

    def problems(self, share: float = 0.9) -> list[str]:
        """List the kernel's problems, each as its name, a colon and a description."""
        if self.error:
            return [f"error: {self.error}"]
        if self.overflow_bits:
            return [f"overflow: {self.overflow_bits} bits are wanting"]
        problems = []
        if self.fell_back:
            problems.append("fallback: the compiler gave up an optimisation to make it fit")
        if self.share > share:
            problems.append(f"share: {self.share:.1%} of the Unified Buffer")
        if self.scalarised:
            problems.append(f"scalarised: {self.scalarised[:3]}")
        if not self.loads_in_loops:
            problems.append("no loop: nothing is loaded within one, so nothing is double-buffered")
        if self.single_buffered:
            problems.append(f"single-buffered: {self.single_buffered[:3]}")
        return problems


def plan(mlir: str, version: str, arguments: tuple[str, ...] = ARGUMENTS) -> Planned:
    """Compile lowered code with a version of the compiler, and read its memory plan."""
    return read(*compiled(mlir, version, arguments))


def compiled(mlir: str, version: str, arguments: tuple[str, ...] = ARGUMENTS) -> tuple[str, str]:
    """Return the final code, with its buffers placed, and the compiler's messages.

    The code is empty if the kernel does not fit.
    """
    key = "\n".join([version, *arguments, mlir])
    code, messages = cached("compiled", key, lambda: compile_anew(mlir, version, arguments))
    return code, messages


def compile_anew(
    mlir: str, version: str, arguments: tuple[str, ...] = ARGUMENTS
) -> tuple[str, str]:
    """Return what `compiled` returns, by the compiler in any case."""
    (chip,) = (name.removeprefix(TARGET) for name in arguments if name.startswith(TARGET))
    # triton-ascend takes this attribute out before it calls the compiler.
    mlir = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", mlir)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.mlir").write_text(mlir)
        done = subprocess.run(
            [
                compiler(version, chip),
                folder / "kernel.mlir",
                *arguments,
                "-o",
                folder / "kernel.o",
            ],
            env={
                **os.environ,
                "PATH": f"{HERE}:{os.environ['PATH']}",
                "HIVMC_VERSION": version,
                "HIVMC_KEEP": str(folder / "kept.mlir"),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        kept = folder / "kept.mlir"
        code = kept.read_text() if kept.exists() else ""
    return code, (done.stdout + done.stderr)[-6000:]


def read(code: str, messages: str) -> Planned:
    """Read the memory plan from the final code, and its failures from the messages."""
    overflows = [int(bits) for bits in re.findall(r"ub overflow, requires (\d+) bits", messages)]
    if not code and not overflows:
        return Planned(0, 0, False, [], 0, [], messages[-1500:] or "no code and no message")
    analysis = _Analysis(code)
    return Planned(
        ub_bytes=analysis.ub_bytes,
        # If the kernel fits in the end, an attempt that overflowed before means a fallback.
        overflow_bits=0 if code else overflows[-1],
        fell_back=bool(overflows) or "automatically set" in messages,
        scalarised=analysis.scalarised,
        loads_in_loops=analysis.loads,
        single_buffered=analysis.single_buffered,
        error="",
    )


# A buffer's addresses, as %x = hivm.hir.pointer_cast(%c64_i64) : memref<1x64xf32, ...<ub>>
_CONSTANT = re.compile(
    r"(%\w+) = (?:arith\.constant (-?\d+) : i64|llvm\.mlir\.constant\((-?\d+) : i64\))"
)
_PLACED = re.compile(r"(%\w+) = hivm\.hir\.pointer_cast\(([^)]*)\)([^:]*): (memref<.*)")
_SELECTED = re.compile(r"(%\w+) = arith\.select %\w+, (%\w+), %\w+ : memref<")
_VIEWED = re.compile(r"(%\w+) = memref\.(?!load|alloc)\w+ (%\w+)")
# Some versions of the compiler name the load, and others call the library's function.
_LOADED = re.compile(r"@load_gm_to_ubuf\w*\(%\w+, (%\w+)|hivm\.hir\.load ins\(.*?\) outs\((%\w+)")
_ACCESSED = re.compile(r"memref\.(?:load|store) .*: (memref<.*address_space<ub>.*)")
_TYPE = re.compile(r"memref<((?:[\d?]+x)*)(\w+)")


class _Analysis:
    """Analyses the code in one pass; each line is an operation."""

    def __init__(self, code: str) -> None:
        self.constants: dict[str, int] = {}
        self.ub_bytes = 0
        self.loads = 0
        self.scalarised: list[str] = []
        self.single_buffered: list[str] = []
        # Value -> the value that it is a view of; the values that are one of a pair of buffers; and
        # value -> its type.
        self.view_of: dict[str, str] = {}
        self.pairs: set[str] = set()
        self.types: dict[str, str] = {}
        regions: list[bool] = []
        for line in map(str.strip, code.splitlines()):
            if line.startswith("}") and regions:
                regions.pop()
            self._operation(line, any(regions))
            if line.endswith("{"):
                regions.append(re.search(r"\bscf\.(for|while|parallel)\b", line) is not None)

    def _operation(self, line: str, in_loop: bool) -> None:
        if match := _CONSTANT.match(line):
            self.constants[match[1]] = int(match[2] or match[3])
        elif match := _PLACED.match(line):
            self._placed(*match.groups())
        elif match := _SELECTED.match(line):
            self.pairs.add(match[1])
            self.view_of[match[1]] = match[2]
        elif match := _VIEWED.match(line):
            self.view_of[match[1]] = match[2]
        elif in_loop and (match := _LOADED.search(line)):
            self.loads += 1
            self._loaded(match[1] or match[2])
        elif in_loop and (match := _ACCESSED.search(line)) and _elements(match[1]) != 1:
            self.scalarised.append(line[:120])

    def _placed(self, value: str, addresses: str, sizes: str, type: str) -> None:
        self.types[value] = type
        if "address_space<ub>" not in type:
            return
        if _elements(type) is None:
            raise ValueError(f"plan: a buffer of a size known only at run time: {type}{sizes}")
        places = [self.constants[address.strip()] for address in addresses.split(",")]
        if len(places) > 1:
            # Several addresses: the turns of a loop take them in turn.
            self.pairs.add(value)
        last = max(places)
        self.ub_bytes = max(self.ub_bytes, last + _bytes(type))

    def _loaded(self, buffer: str) -> None:
        # Go from a view back to the buffer that it is of, or to one that is known to be of a pair.
        while buffer not in self.pairs and buffer in self.view_of:
            buffer = self.view_of[buffer]
        type = self.types.get(buffer, "")
        if buffer not in self.pairs and (_elements(type) or FEW + 1) > FEW:
            self.single_buffered.append(type[:60] or buffer)


def _elements(type: str) -> int | None:
    """Return the number of elements of a memref, or None if its type does not say."""
    match = _TYPE.match(type)
    if match is None or "?" in match[1]:
        return None
    elements = 1
    for size in match[1].split("x")[:-1]:
        elements *= int(size)
    return elements


def _bytes(type: str) -> int:
    """Return the bytes that a buffer of this type takes, in whole blocks."""
    bits = (_elements(type) or 0) * BITS[_TYPE.match(type)[2]]
    return -(-bits // (8 * BLOCK)) * BLOCK
