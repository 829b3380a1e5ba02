"""Write docs/reports/npu_chips.md: launches of every kernel, planned for other chips.

    python tests/npu/documents/chips.py [CHIP ...]

runs in the environment of triton-ascend. With a CHIP it prints that chip's part alone, and writes
nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool

from launches import plain_launches
from lower import lower
from plan import ARGUMENTS, TARGET, Planned, plan
from report import table
from toolchain import ARCH, COMPILERS, HERE, OTHER_CHIPS, compiler

DOCUMENT = HERE.parents[1] / "docs" / "reports" / "npu_chips.md"

INTRODUCTION = f"""\
# The Ascend kernels, planned for other chips

Written by `make plan-npu`, which is no part of CI. **Nothing here has run on a device.** Up to
three launches of each kernel are planned: in bfloat16, at the first, the middle and the last of the
shapes at which the host code launches it without options, on a chip with this many cores and this
Unified Buffer (UB). triton-ascend lowers them as for an {ARCH}: its own switch for an Ascend 950
is off. The compilers are those of [npu.md](npu.md), and `bishengir-compile-a5` of the same packages
for the Ascend 950, which that of CANN 8.5.0 does not have. Cores and buffers are those that the
compilers write into the code.

A launch is planned if its buffers take at most 90% of UB, and the compiler gave up no
optimisation for that. Code for the Ascend 950 is lowered so far that accesses element by element
and double-buffered loads are not read from it.
"""


@dataclass(frozen=True)
class Tried:
    """A launch, by its kernel and the label of its call, planned by one version for a chip."""

    kernel: str
    label: str
    version: str
    planned: Planned
    ub_bytes: int

    @property
    def problem(self) -> str:
        """Name what is wrong with the plan, or return an empty string."""
        if re.search(r"#\d+ 0x", self.planned.error):
            return "crashes"
        if self.planned.error:
            lines = self.planned.error.splitlines()
            errors = (line.rpartition("error: ")[2] for line in lines if "error: " in line)
            said = (text for text in errors if "Failed to run" not in text)
            return f"does not compile: {next(said, lines[0])}"
        if self.planned.overflow_bits:
            return f"does not fit: {self.planned.overflow_bits // 8} bytes are wanting"
        if self.planned.fell_back:
            return "fits without an optimisation"
        return f"takes {self.share:.0%} of UB" if self.share > 0.9 else ""

    @property
    def share(self) -> float:
        return self.planned.ub_bytes / self.ub_bytes


def tried(chip: str) -> list[Tried]:
    """Plan three launches of each kernel for a chip, by each version that has a compiler for it."""
    cores, ub_bytes = OTHER_CHIPS[chip]
    launches = {}
    for of_kernel in plain_launches(cores, ub_bytes).values():
        keys = list(of_kernel)
        for key in (keys[0], keys[len(keys) // 2], keys[-1]):
            launches[key] = of_kernel[key]
    arguments = (f"{TARGET}{chip}", *ARGUMENTS[1:])
    versions = [version for version in COMPILERS if compiler(version, chip).exists()]

    def try_one(work: tuple) -> Tried:
        (label, launch), version = work
        result = plan(lower(launch).mlir, version, arguments)
        return Tried(launch.kernel, label, version, result, ub_bytes)

    # Each thread waits for a compiler.
    with ThreadPool(os.cpu_count()) as pool:
        work = [(item, version) for item in launches.values() for version in versions]
        return pool.map(try_one, work, chunksize=1)


def section(chip: str, results: list[Tried]) -> Iterator[str]:
    cores, ub_bytes = OTHER_CHIPS[chip]
    yield f"\n## {chip}\n\n{cores} vector cores, and {ub_bytes} bytes of UB.\n"
    rows = []
    for version in dict.fromkeys(result.version for result in results):
        of_version = [result for result in results if result.version == version]
        good = [result for result in of_version if not result.problem]
        share = max((result.share for result in good), default=0.0)
        kernels = len({result.kernel for result in of_version})
        rows.append([COMPILERS[version], kernels, len(of_version), len(good), f"{share:.0%}"])
    yield from table(["compiler", "kernels", "launches", "planned", "largest share of UB"], rows)
    wrong = [result for result in results if result.problem]
    if wrong:
        yield "\nThe others:\n"
        yield from table(
            ["kernel", "call", "compiler", "what the compiler does"],
            ([f"`{r.kernel.strip('_')}`", r.label, COMPILERS[r.version], r.problem] for r in wrong),
        )


def main(*chips: str) -> None:
    parts = ["\n".join(section(chip, tried(chip))) for chip in chips or OTHER_CHIPS]
    if chips:
        print("\n".join(parts))
        return
    DOCUMENT.write_text(INTRODUCTION + "\n".join(parts) + "\n")
    print(f"== wrote {DOCUMENT}")


if __name__ == "__main__":
    main(*sys.argv[1:])
