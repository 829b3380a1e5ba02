"""Write docs/npu.md: what was found of every npu kernel.

    python tests/npu/report.py TRAFFIC.json

in the environment of triton-ascend, with what tests/support/traffic.py printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import peer
from launch_cases import BF16, counted
from launches import Call, Launch, calls
from lower import TRITON_ASCEND, lower
from plan import Planned, plan
from toolchain import ARCH, COMPILERS, HERE, UB_BYTES, VECTOR_CORES, missing_compiler

DOCUMENT = HERE.parents[1] / "docs" / "npu.md"

INTRODUCTION = f"""\
# The Ascend kernels, without an Ascend device

Written by `make test-npu`, which fails where a kernel is not as described here. It needs Linux on
x86-64 and Python 3.10 or 3.11, and fetches the rest into the user's cache.

**No kernel here has been run on an Ascend device.** What is shown instead is of {{launches}}
launches of {{kernels}} kernels, captured from the host code: narrow, odd, model-sized and huge
shapes, three dtypes, and the options that change the code.

1. Lowered: triton-ascend {TRITON_ASCEND} takes every launch, as the host code specialises it.
2. Planned: Ascend's own compiler, bishengir-compile as in {{cann}},
   places every launch in the {UB_BYTES} bytes of Unified Buffer of a vector core of an
   {ARCH}. It takes 90% of it at most; no optimisation is given up to make it fit; no loop
   goes over a buffer element by element; whatever a loop loads is double-buffered, except what a
   row has one of. Grids have one dimension, and at most as many programs as there are vector
   cores, {VECTOR_CORES}.
3. Executed: the lowered code of small cases, compiled for the CPU by MLIR and clang, gives outputs
   and gradients that are no further from float64 than twice the error of the PyTorch definition,
   and a rounding. Changed code is caught.
4. Traffic, under Triton's interpreter: a kernel whose row fits the buffer moves each input and
   output once, one whose row does not fit reads its inputs twice.

What this does not show: speed; races between cores; the synchronisation within a core; how a
device rounds, in functions such as exp and where its compiler fuses casts.

With a device, torch_npu and triton-ascend, `python -m pytest --device npu` runs the tests of the
kernels on it, and `python -m liger_ops.bench --device npu` times them.
"""

SUMMARY = """
## Every kernel

The most of the Unified Buffer that any launch takes, in every dtype and with every option.
"""

DETAIL = """
## By op and shape, in bf16

A tile is rows x columns. Traffic is how often the inputs and outputs that have the batch's rows
cross the memory bus in the whole call; 1 is the least. Weights are not in it: a kernel whose rows
fit reads them once a program.
"""

PEER = """
## Beside Liger-Kernel {version}

Its kernels for Ascend, launched by its own host code on bf16 of {rows} rows, lowered and planned in
the same way. A share of the Unified Buffer is the most of the versions of CANN. It is not better
for being smaller: a kernel that holds a row reads it once, one whose tile is narrower than a row of
a norm or a softmax reads it twice. What was found there is what the rules above exclude, with the
versions of CANN that it was found on; "over 90%" is a rule of this project, and runs.
Its figures may differ from one machine to another, and no check depends on them.
"""

FOUND = {
    "lowering": "does not lower",
    "error": "not compiled",
    "overflow": "does not fit",
    "fallback": "fits without an optimisation",
    "share": "over 90%",
    "scalarised": "element by element",
    "single-buffered": "single-buffered",
    "no loop": "no loop",
}

Plans = dict[str, Planned]


def planned(launch: Launch) -> Plans:
    mlir = lower(launch).mlir
    return {version: plan(mlir, version) for version in COMPILERS if not missing_compiler(version)}


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "| " + " | ".join("---" for _ in header) + " |"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def versions() -> list[str]:
    return [f"UB, {cann}" for version, cann in COMPILERS.items() if not missing_compiler(version)]


def buffered(plans: Plans) -> str:
    """Loads in loops that are double-buffered, of all of them, in the worst of the versions."""
    worst = max(plans.values(), key=lambda found: len(found.single_buffered), default=None)
    if worst is None:
        return "-"
    return f"{worst.loads_in_loops - len(worst.single_buffered)} of {worst.loads_in_loops}"


def by_kernel(found: Iterable[Call], plans: dict[str, Plans]) -> Iterator[list[object]]:
    launches = {launch.key: launch.kernel for call in found for launch in call.launches}
    for kernel in sorted(set(launches.values())):
        keys = [key for key, name in launches.items() if name == kernel]
        shares = [
            f"{max(plans[key][version].share for key in keys):.0%}"
            for version in COMPILERS
            if not missing_compiler(version)
        ]
        yield [f"`{kernel.strip('_')}`", len(keys), *shares]


def by_shape(
    op: str, found: Iterable[Call], plans: dict[str, Plans], traffic: dict[str, float]
) -> Iterator[list[object]]:
    for call in found:
        for i, launch in enumerate(call.launches):
            used = plans[launch.key]
            ratio = traffic.get(call.label)
            yield [
                call.case.label.removeprefix("bf16 ") if i == 0 else "",
                ("backward" if call.backward else "forward") if i == 0 else "",
                f"`{launch.kernel.strip('_')}`",
                "{}x{}".format(*launch.tile),
                launch.grid[0],
                *(found.ub_bytes for found in used.values()),
                buffered(used),
                f"{ratio:.2f}" if ratio is not None and i == 0 else "",
            ]


def most(plans: Iterable[Plans]) -> str:
    shares = [found.share for used in plans for found in used.values() if not found.overflow_bits]
    return f"{max(shares):.0%}" if shares else "-"


def problems_of(launches: Iterable[Launch]) -> str:
    """What was found of them, and by which versions of CANN."""
    found: dict[str, list[str]] = {}
    for launch in launches:
        if lower(launch).error:
            found.setdefault("lowering", [])
            continue
        for version, used in planned(launch).items():
            for problem in used.problems():
                where = found.setdefault(problem.split(":")[0], [])
                if COMPILERS[version] not in where:
                    where.append(COMPILERS[version])
    return "; ".join(
        FOUND[name] + (f" ({', '.join(where).replace('CANN ', '')})" if where else "")
        for name, where in found.items()
    )


def beside_the_peer(found: Iterable[Call], plans: dict[str, Plans]) -> Iterator[list[object]]:
    ours = {(call.case.op.id, call.backward, call.case.label): call for call in found}
    for call in peer.calls():
        own = ours[call.op, call.backward, f"bf16 {peer.ROWS}x{call.N}"]
        yield [
            call.op,
            call.N,
            "backward" if call.backward else "forward",
            ", ".join("{}x{}".format(*launch.tile) for launch in own.launches),
            most(plans[launch.key] for launch in own.launches),
            ", ".join("{}x{}".format(*peer.tile(launch)) for launch in call.launches),
            most(planned(launch) for launch in call.launches if not lower(launch).error),
            problems_of(call.launches),
        ]


def document(traffic: dict[str, float]) -> str:
    found = calls()
    plans = {launch.key: planned(launch) for call in found for launch in call.launches}
    lines = [
        INTRODUCTION.format(
            launches=len(plans),
            kernels=len({launch.kernel for call in found for launch in call.launches}),
            cann=", ".join(c for v, c in COMPILERS.items() if not missing_compiler(v)),
        ),
        SUMMARY,
        *table(["kernel", "launches", *versions()], by_kernel(found, plans)),
        DETAIL,
    ]
    shown = {(case.op.id, case.label) for case, _ in counted()}
    documented = [
        call
        for call in found
        if call.case.case.dtype is BF16 and (call.case.op.id, call.case.label) in shown
    ]
    header = ["shape", "", "kernel", "tile", "grid", *versions(), "double-buffered", "traffic"]
    for op, group in groupby(documented, key=lambda call: call.case.op.id):
        lines += ["", f"### {op}", ""]
        lines += table(header, by_shape(op, group, plans, traffic))
    if peer.installed():
        lines.append(PEER.format(version=peer.installed(), rows=peer.ROWS))
        header = ["op", "columns", "", "tile here", "UB", "tile there", "UB", "found there"]
        lines += table(header, beside_the_peer(found, plans))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main(path: str) -> None:
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(json.loads(Path(path).read_text())))
    print(f"== wrote {DOCUMENT}")


if __name__ == "__main__":
    main(*sys.argv[1:])
