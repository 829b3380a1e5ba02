"""Write docs/reports/npu.md, the measurements of every npu kernel.

    python tests/npu/documents/report.py TRAFFIC.json

runs in the environment of triton-ascend; TRAFFIC.json is the output of tests/support/traffic.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import peer
from count import Counts, count
from launch_cases import BF16, counted
from launches import Call, Launch, calls
from lower import TRITON_ASCEND, lower
from plan import Planned, compiled, plan
from toolchain import ARCH, COMPILERS, HERE, UB_BYTES, VECTOR_CORES, missing_compiler

# Instructions are counted in the code of this version of the compiler.
NEWEST = list(COMPILERS)[-1]
DOCUMENT = HERE.parents[1] / "docs" / "reports" / "npu.md"

INTRODUCTION = f"""\
# The Ascend kernels, without an Ascend device

Written by `make test-npu`, which fails if a kernel differs from this description. It needs Linux on
x86-64 and Python 3.11, and downloads the rest into the user's cache.

**No kernel here has run on an Ascend device.** Instead, {{launches}} launches of {{kernels}}
kernels are captured from the host code and checked: narrow, odd, model-sized and huge shapes, three
dtypes, and every option that changes the code.

1. Lowering: triton-ascend {TRITON_ASCEND} lowers every launch, as the host code specialises it.
   The lowered code has nothing of what `tests/npu/reported.py` lists, such as a reduction over the
   first of three axes: users report wrong numbers from it on a device.
2. Memory plan: Ascend's own compiler, bishengir-compile of {{cann}},
   places every launch in the {UB_BYTES} bytes of Unified Buffer (UB) of a vector core of an
   {ARCH}. A launch uses at most 90% of it; no optimisation is disabled to make it fit; no
   loop processes a buffer element by element; every load in a loop is double-buffered, except
   values of which a row has only one. Grids have one dimension, and at most {VECTOR_CORES}
   programs, the number of vector cores.
3. Execution: the lowered code of small cases is compiled for the CPU by MLIR and clang. The errors
   of outputs and gradients against float64 are at most twice those of the PyTorch definition, plus
   a rounding. A test changes the code and checks that this is detected.
4. Memory traffic, in Triton's interpreter: a kernel whose row fits in the buffer, as float32 or in
   its own dtype, moves each input and output once; a backward kernel that keeps x alone reads dy
   twice; a kernel whose row does not fit reads its inputs twice, except for sparsemax's, which
   reads x with every step of its iteration and is not counted.

This does not show: speed; races between cores; synchronisation within a core; the rounding of a
device, in functions such as exp and where its compiler fuses casts.

## The first day with a device

Both commands below run whole on a simulated device, where they report no figure
(`tests/bench/test_bench_simulated_npu.py`, and `LIGER_OPS_SIMULATED_NPU=1` with the first of them).
In an environment with CANN, torch_npu and triton-ascend, and without upstream triton:

1. `npu-smi info; pip list | grep -i -E "torch|triton"`: send the output.
2. `python -c "import torch, torch_npu, liger_ops; from liger_ops.lowering.npu import tiling;
   print(tiling.vector_cores(), tiling.ub_bytes())"`: if it is not 40 and {UB_BYTES} (48 on some),
   send both numbers; every tile depends on them.
3. `python -m pytest --device npu tests/ops/test_kernels.py -k rms_norm -x`: norms, in minutes.
4. `python -m pytest --device npu tests -rfE > tests.txt`: every op. Send `tests.txt`, whole.
5. `python -m liger_ops.bench --device npu --ops rms_norm,softmax,swiglu --json first.json`
6. `python -m liger_ops.bench --device npu --json npu.json --docs figures.md`: liger-kernel is timed
   beside, if it is installed. Send both files, also if rows failed: they have the reasons.
7. For the slowest kernel, `msprof op --kernel-name=NAME python -m liger_ops.bench --device npu
   --ops OP`: send the folder. It says which pipe waits, which nothing here shows.
"""

SUMMARY = """
## Every kernel

The largest share of the Unified Buffer used by any launch, over all dtypes and options.
"""

DETAIL = """
## By op and shape, in bf16

A tile is rows x columns. 1x2048 of 16384 is a piece of a row that stays in the buffer in its own
dtype, as 16384 columns. Traffic is how often the call moves its inputs and outputs, counting only
tensors that have the batch's rows; 1 is the minimum. Weights are not counted: a kernel whose rows
fit a tile reads them once per program, and so does one whose rows stay if the weights fit beside
them.

A chunk of the logits of linear_cross_entropy is read twice and written once: `walk_kernel` reads
it, and `gradient_kernel` reads it and writes the gradient in its place. A row of 128256 logits in
bf16 takes 256512 bytes, more than the whole Unified Buffer, so this is the least. A row of 32000
takes 128000 bytes with its second buffer and could stay, for two passes in the place of three;
these kernels do not do that, because PyTorch computes the factors of each token between them. No
size of the chunk changes that: it sets how many rows are in memory, and a core holds one.
"""

PEER = """
## Beside Liger-Kernel {version}

Liger-Kernel's Ascend kernels, launched by its own host code on bf16 of the same shapes, lowered and
planned in the same way. "UB" is the largest share over the CANN versions. Lower is not better by
itself: a kernel that holds a whole row, or keeps it in its own dtype, reads it once, and another
kernel of a norm or a softmax whose tile is narrower than a row reads it twice. "found there" lists
violations of the rules above, with the CANN versions. "over 90%" is this project's own limit; such
kernels still run. These figures may differ between machines, and no check depends on them.

The ropes are of a model's 32 heads of q and 8 of k. The losses are means. linear_cross_entropy is
its kernels on the logits, there of all tokens at once, without the matrix products; its passes are
one row, because here the forward pass computes the gradients.
"""

COUNTED = """
## Beside Liger-Kernel: instructions and bytes of a row

The same calls, by their final code of {cann}, evaluated for every program of the grid: the vector
instructions for a row, of 256 bytes each, and the bytes that a row costs between global memory and
the Unified Buffer, with its share of the weights. A row of group_norm is a group, and a row of a
rope is a token with all its heads. No token of a loss is ignored. The instructions of PyTorch, such
as those that sum the programs' parts of a weight's gradient, and those of the scalar unit are not
counted, here or there. Instructions of one kind are as fast as those of another in this count,
which they are not on a device. A kernel that does not fit, or does not lower, has no code.

Where there are more instructions or bytes here, in bold, the reasons are:

- `rms_norm` forward at 8192 columns: a row that stays in its own dtype is widened in both passes
  over it. The kernel there holds the row in float32, and takes 92% of the buffer.
- `layer_norm` backward: mean and rstd are computed anew from x; the forward there saves them. And
  beyond 4096 columns x and dy are widened again in each pass over them.
- `fused_add_rms_norm` forward: x + residual is computed, and rounded, in both passes. The kernel
  there writes the sum to memory and reads it back, which is half again as many bytes.
- `softmax` backward at 8192 columns: one instruction more, as the row's sum is made in pieces.
- `swiglu` backward: three multiplications by the multipliers of gate and result, which the op there
  does not have, and two that clamp gate, so that a gate of inf has the gradient that it should, and
  not NaN.
- `group_norm` of groups that fit a tile (2x640x7x9): the variance is a sum of squared deviations,
  and mean and rstd are computed anew in the backward. The forward there takes the squared mean from
  the mean square, which cancels if the mean is large, and saves both.
- `group_norm` of large groups (2x320x64x64): the same, by a running mean and squared deviations of
  each lane, whose elements are counted too. The bytes are the moments of the channels.
- `group_norm` of 2x100000, which is layer_norm of two rows: x is read twice, and each row reads
  weight and bias. The backward stores four statistics of a row.
- `rope-sections`, `rope-complex`: the tables are loaded and prepared for q, and again for k. The
  halves of a table with sections may differ, and both are loaded; the kernel there loads one.
  Complex pairs are split in float32, there in bf16.
- `cross_entropy` forward of 32000 columns: the last tile of a row, which is wider here, is filled
  with -inf before it is loaded.
- `cross_entropy` backward, and `linear_cross_entropy` with it: every tile compares its columns with
  the target's and subtracts, and replaces the logits of tokens without a gradient, which may be
  NaN. The kernel there has a branch for ignored tokens, and stores the target's element again after
  its tile. The bytes are factors of each token, which PyTorch computes here.
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
    """Return the memory plan of a launch by each installed compiler."""
    mlir = lower(launch).mlir
    return {version: plan(mlir, version) for version in COMPILERS if not missing_compiler(version)}


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "| " + " | ".join("---" for _ in header) + " |"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def versions() -> list[str]:
    return [f"UB, {cann}" for version, cann in COMPILERS.items() if not missing_compiler(version)]


def tile(launch: Launch) -> str:
    """Return rows x columns of a tile, with the columns of the kept row if there is one."""
    kept = launch.source.constants.get("KEPT") and launch.source.constants["ROW"]
    return "{}x{}".format(*launch.tile) + (f" of {kept}" if kept else "")


def buffered(plans: Plans) -> str:
    """Return how many loads in loops are double-buffered, by the compiler with the fewest."""
    worst = max(plans.values(), key=lambda result: len(result.single_buffered), default=None)
    if worst is None:
        return "-"
    return f"{worst.loads_in_loops - len(worst.single_buffered)} of {worst.loads_in_loops}"


def by_kernel(all_calls: Iterable[Call], plans: dict[str, Plans]) -> Iterator[list[object]]:
    launches = {launch.key: launch.kernel for call in all_calls for launch in call.launches}
    for kernel in sorted(set(launches.values())):
        keys = [key for key, name in launches.items() if name == kernel]
        shares = [
            f"{max(plans[key][version].share for key in keys):.0%}"
            for version in COMPILERS
            if not missing_compiler(version)
        ]
        yield [f"`{kernel.strip('_')}`", len(keys), *shares]


def by_shape(
    op: str, calls_of_op: Iterable[Call], plans: dict[str, Plans], traffic: dict[str, float]
) -> Iterator[list[object]]:
    for call in calls_of_op:
        for i, launch in enumerate(call.launches):
            used = plans[launch.key]
            ratio = traffic.get(call.label)
            yield [
                call.case.label.removeprefix("bf16 ") if i == 0 else "",
                ("backward" if call.backward else "forward") if i == 0 else "",
                f"`{launch.kernel.strip('_')}`",
                tile(launch),
                launch.grid[0],
                *(result.ub_bytes for result in used.values()),
                buffered(used),
                f"{ratio:.2f}" if ratio is not None and i == 0 else "",
            ]


def most(plans: Iterable[Plans]) -> str:
    """Return the largest share of the buffer of kernels that fit."""
    shares = [
        result.share for used in plans for result in used.values() if not result.overflow_bits
    ]
    return f"{max(shares):.0%}" if shares else "-"


def problems_of(launches: Iterable[Launch]) -> str:
    """List the problems of the kernels, each with the versions of CANN that have it."""
    by_problem: dict[str, list[str]] = {}
    for launch in launches:
        if lower(launch).error:
            by_problem.setdefault("lowering", [])
            continue
        for version, used in planned(launch).items():
            for problem in used.problems():
                where = by_problem.setdefault(problem.split(":")[0], [])
                if COMPILERS[version] not in where:
                    where.append(COMPILERS[version])
    return "; ".join(
        FOUND[name] + (f" ({', '.join(where).replace('CANN ', '')})" if where else "")
        for name, where in by_problem.items()
    )


def beside_the_peer(pairs: Iterable[peer.Pair], plans: dict[str, Plans]) -> Iterator[list[object]]:
    for pair in pairs:
        yield [
            pair.op,
            pair.shape,
            pair.passes,
            ", ".join(dict.fromkeys(map(tile, pair.own))),
            most(plans[launch.key] for launch in pair.own),
            ", ".join(map(peer.tile, pair.launches)),
            most(planned(launch) for launch in pair.launches if not lower(launch).error),
            problems_of(pair.launches),
        ]


def counted_rows(launches: Iterable[Launch]) -> Counts | None:
    """Count the launches of a call, or return None if a kernel has no final code."""
    total = Counts()
    for launch in launches:
        code = compiled(lower(launch).mlir, NEWEST)[0] if not lower(launch).error else ""
        if not code:
            return None
        total += count(launch, code)
    return total


def counted_beside_the_peer(pairs: Iterable[peer.Pair]) -> Iterator[list[object]]:
    for pair in pairs:
        here, there = counted_rows(pair.own), counted_rows(pair.launches)
        cells = [
            [f"{total.instructions / pair.rows:.0f}", f"{total.bytes / pair.rows:.0f}"]
            if total
            else ["-", "-"]
            for total in (here, there)
        ]
        for i, (ours, theirs) in enumerate(zip(*cells, strict=True)):
            if theirs != "-" and int(ours) > int(theirs):
                cells[0][i] = f"**{ours}**"
        yield [pair.op, pair.shape, pair.passes, *cells[0], *cells[1]]


def document(traffic: dict[str, float]) -> str:
    """Return the text of npu.md. traffic: label of a call -> ratio of its traffic."""
    all_calls = calls()
    plans = {launch.key: planned(launch) for call in all_calls for launch in call.launches}
    lines = [
        INTRODUCTION.format(
            launches=len(plans),
            kernels=len({launch.kernel for call in all_calls for launch in call.launches}),
            cann=", ".join(c for v, c in COMPILERS.items() if not missing_compiler(v)),
        ),
        SUMMARY,
        *table(["kernel", "launches", *versions()], by_kernel(all_calls, plans)),
        DETAIL,
    ]
    shown = {(case.op.id, case.label) for case, _ in counted()}
    documented = [
        call
        for call in all_calls
        if call.case.case.dtype is BF16 and (call.case.op.id, call.case.label) in shown
    ]
    header = ["shape", "", "kernel", "tile", "grid", *versions(), "double-buffered", "traffic"]
    for op, group in groupby(documented, key=lambda call: call.case.op.id):
        lines += ["", f"### {op}", ""]
        lines += table(header, by_shape(op, group, plans, traffic))
    pairs = list(peer.pairs(all_calls)) if peer.installed() else []
    if pairs:
        lines.append(PEER.format(version=peer.installed()))
        header = ["op", "shape", "", "tile here", "UB", "tile there", "UB", "found there"]
        lines += table(header, beside_the_peer(pairs, plans))
    if pairs and not missing_compiler(NEWEST):
        lines.append(COUNTED.format(cann=COMPILERS[NEWEST]))
        header = ["op", "shape", "", "instructions here", "bytes here"]
        header += ["instructions there", "bytes there"]
        lines += table(header, counted_beside_the_peer(pairs))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main(path: str) -> None:
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(json.loads(Path(path).read_text())))
    print(f"== wrote {DOCUMENT}")


if __name__ == "__main__":
    main(*sys.argv[1:])
