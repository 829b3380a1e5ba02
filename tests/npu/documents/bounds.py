"""Write docs/reports/npu_bounds.md: bounds of the time of a launch of each kernel, by its bytes.

    python tests/npu/documents/bounds.py

runs in the environment of triton-ascend, as `make bound-npu` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from count import by_program
from launch_cases import BF16, LaunchCase, counted, launch_case
from launch_forms import FP32
from launches import Launch, calls_of
from lower import lower
from op_table import OPS
from plan import compiled
from report import table
from toolchain import ARCH, COMPILERS, HERE

DOCUMENT = HERE.parents[1] / "docs" / "reports" / "npu_bounds.md"
NEWEST = list(COMPILERS)[-1]

# Published rates, in bytes a second: of a core's Unified Buffer to and from memory, and of memory.
CORE_RATE, MEMORY_RATE = 86.5e9, 1.6e12

INTRODUCTION = f"""\
# Bounds of the Ascend kernels' time

Written by `make bound-npu`. **These are bounds, and no times: nothing was run on a device, and
nothing was timed.** Nothing here says how close a launch comes to its bound.

The bytes between memory and the Unified Buffer, and the vector instructions of 256 bytes, are
counted in the final code of {COMPILERS[NEWEST]} for an {ARCH}, for each program of the grid, as in
[npu.md](npu.md). The bound is the larger of two: the bytes of all programs at
{MEMORY_RATE / 1e12:.1f} TB/s, and those of the program with most at {CORE_RATE / 1e9:.1f} GB/s.
Both rates are published ones, of all memory and of one core, and were not measured. What is read a
second time may come from the L2 cache, which is faster than memory: the first of the two holds as
far as that is not so.
Instructions have no published rate that was found, and are given as a number, of the program with
most of them. What scalar units, PyTorch and the start of a launch take is not in a bound.

## A launch of each kernel

At the last shape of [npu.md](npu.md) that launches it, in bfloat16.
"""

BESIDE = f"""
## Beside published times

Times that public documents and pull requests of Liger-Kernel give for an {ARCH}, which were
not repeated here, and the bounds of this project's launches for the same shapes. Those times
contain what a bound leaves out, and their ratio says nothing of the speed of these kernels. Whether
the times of fused_add_rms_norm are of the forward pass alone is not known.
"""


@dataclass(frozen=True)
class Bound:
    """The bytes that a launch moves, and the most bytes and instructions of a program."""

    bytes: int
    most_bytes: int
    instructions: int

    @property
    def milliseconds(self) -> float:
        return 1e3 * max(self.bytes / MEMORY_RATE, self.most_bytes / CORE_RATE)


def bound(launch: Launch) -> Bound | None:
    """Return the bound of a launch, or None if numbers that the code loads decide what it does."""
    try:
        programs = by_program(launch, compiled(lower(launch).mlir, NEWEST)[0])
    except (KeyError, TypeError, ValueError):
        return None
    return Bound(
        sum(program.bytes for program in programs),
        max(program.bytes for program in programs),
        max(program.instructions for program in programs),
    )


def by_kernel(cases: Iterable[LaunchCase]) -> Iterator[list[object]]:
    """Yield a row for each kernel, of the last of the cases that launches it."""
    last = {
        launch.kernel: (call.label, launch) for call in calls_of(cases) for launch in call.launches
    }
    for kernel, (label, launch) in sorted(last.items()):
        found = bound(launch)
        cells = ["not counted", "", "", ""]
        if found is not None:
            cells = [found.bytes, found.most_bytes, found.instructions]
            cells.append(f"{found.milliseconds:.4f}")
        yield [f"`{kernel.strip('_')}`", label, launch.grid[0], *cells]


# Op, dtype, shape, whether backward too -> the times of Liger-Kernel and, if given, of PyTorch.
PUBLISHED = {
    ("fused_add_rms_norm", FP32, (2048, 2048), False): (0.346, 0.262),
    ("poly_norm", BF16, (2048, 4096), False): (0.339, None),
    ("attn_res", BF16, (8, 8192, 4096), True): (22.43, None),
}


def beside() -> Iterator[list[object]]:
    for (op, dtype, shape, both), (there, pytorch) in PUBLISHED.items():
        directions = (False, True) if both else (False,)
        case = launch_case(OPS[op], dtype, {"shape": shape}, directions)
        bounds = [bound(launch) for call in calls_of([case]) for launch in call.launches]
        total = "" if None in bounds else f"{sum(b.milliseconds for b in bounds):.4f}"
        passes = "both" if both else "forward"
        yield [op, case.label, passes, len(bounds), total, there, pytorch or ""]


def main() -> None:
    cases = [case for case, _ in counted()]
    header = ["kernel", "call", "programs", "bytes", "most of a program", "instructions of one"]
    lines = [INTRODUCTION, *table([*header, "bound, ms"], by_kernel(cases)), BESIDE]
    header = ["op", "shape", "passes", "launches", "bound, ms", "Liger-Kernel, ms", "PyTorch, ms"]
    DOCUMENT.write_text("\n".join([*lines, *table(header, beside())]) + "\n")
    print(f"== wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
