"""Every launch lowers, and Ascend's compilers place its buffers in the Unified Buffer and
double-buffer its loads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from launches import BACKEND, Launch, calls, specialised
from lower import Lowered, lower
from plan import ARGUMENTS, TARGET, Planned, plan
from reported import reported
from toolchain import COMPILERS, OTHER_CHIPS, compiler, missing_compiler


@dataclass(frozen=True)
class Excused:
    """A problem, by its name in Planned.problems, that a kernel may have, and the reason."""

    kernel: str
    problem: str
    reason: str


# The rows of a run are loaded once, for all turns of the inner loop; the products of the cube core
# come back through global memory.
WALK = "what a turn loads goes to the cube core; the rest is loaded once a run"
EXCUSED: tuple[Excused, ...] = tuple(
    Excused(f"_neighborhood_{name}_kernel", "single-buffered", WALK)
    for name in ("forward", "query_gradient", "key_gradient")
)


def distinct_launches() -> dict[str, Launch]:
    """Map the label of a launch to the launch, for launches of different code.

    The label has that of the first call with this code, the kernel, and its index in the call.
    """
    by_code: dict[str, tuple[str, Launch]] = {}
    for call in calls():
        for i, launch in enumerate(call.launches):
            by_code.setdefault(launch.key, (f"{call.label} {launch.kernel}:{i}", launch))
    return dict(by_code.values())


LAUNCHES = distinct_launches()


@pytest.mark.parametrize("label", LAUNCHES)
def test_launch(label, needs):
    launch = LAUNCHES[label]
    lowered = lower(launch)
    assert not lowered.error, f"{label} does not lower: {lowered.error}"
    assert not (lines := reported(lowered.mlir)), f"{label}: " + "; ".join(lines)
    missing = [reason for reason in map(missing_compiler, COMPILERS) if reason]
    problems = [
        f"{version}: {problem}"
        for version in COMPILERS
        if not missing_compiler(version)
        for problem in plan(lowered.mlir, version).problems()
        if not excuse(launch.kernel, problem)
    ]
    assert not problems, f"{label}, tile {launch.tile}: " + "; ".join(problems)
    needs("; ".join(missing))


def excuse(kernel: str, problem: str) -> Excused | None:
    """Return the entry that excuses a kernel's problem, or None."""
    name = problem.split(":")[0]
    return next((e for e in EXCUSED if (e.kernel, e.problem) == (kernel, name)), None)


# Kernels that each do one thing that an Ascend kernel should not.


@triton.jit
def _doubled(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    for start in tl.range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + cols, x * 2, mask=cols < N)


@triton.jit
def _without_a_loop(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, x * 2, mask=cols < N)


@triton.jit
def _cumulative(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    for start in tl.range(tl.program_id(0) * BLOCK_N, N, tl.num_programs(0) * BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + cols, tl.cumsum(x, 0), mask=cols < N)


@triton.jit
def _over_the_first_of_three_axes(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    rows, cols = tl.arange(0, 4)[:, None, None], tl.arange(0, 4)[None, :, None]
    x = tl.load(x_ptr + (rows * 4 + cols) * BLOCK_N + tl.arange(0, BLOCK_N)[None, None, :])
    at = tl.arange(0, 4)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y_ptr + at, tl.sum(x, axis=0) + tl.max(x, axis=0))


@triton.jit
def _over_other_axes(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    rows, cols = tl.arange(0, 4)[:, None], tl.arange(0, 4 * BLOCK_N)[None, :]
    x = tl.load(x_ptr + rows * (4 * BLOCK_N) + cols)
    sums = tl.sum(tl.reshape(x, (4, 4, BLOCK_N)), axis=1)
    at = tl.arange(0, 4)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y_ptr + at, sums + tl.reshape(tl.sum(x, axis=0), (4, BLOCK_N)))


@triton.jit
def _with_a_mask_of_data(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, x, mask=x > 0)


@triton.jit
def _in_place(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(y_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, tl.where(x > 0, x * 2, x - 1), mask=cols < N)


@triton.jit
def _with_a_masked_number(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    before = tl.load(x_ptr + N - 1, mask=N > 0, other=-1)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols) + before)


@triton.jit
def _with_a_number(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    before = tl.where(N > 0, tl.load(x_ptr + tl.maximum(N - 1, 0)), -1)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols) + before)


@triton.jit
def _with_an_atomic(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    tl.atomic_add(y_ptr + cols, tl.load(x_ptr + cols), mask=cols < N)


@triton.jit
def _that_does_not_lower(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    tl.static_assert(BLOCK_N == 0, "it does not lower")
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))


def lowered(kernel, block: int) -> Lowered:
    """Lower one of the kernels above for a million elements."""
    x = torch.empty(16)
    return lower(specialised(kernel, (1,), (x, x, 1 << 20), {"BLOCK_N": block}))


def planned(needs, version: str, kernel, block: int, arguments=ARGUMENTS) -> Planned:
    needs(missing_compiler(version))
    return plan(lowered(kernel, block).mlir, version, arguments)


each_version = pytest.mark.parametrize("version", COMPILERS)


@each_version
def test_a_good_kernel_has_no_problem(needs, version):
    result = planned(needs, version, _doubled, 2048)
    assert result.problems() == []
    # At least the two buffers of x's double-buffered tile; those of y may be the same.
    assert result.loads_in_loops == 1 and result.ub_bytes >= 2 * 2048 * 4


@each_version
@pytest.mark.parametrize(
    ("kernel", "block", "problem"),
    [
        (_doubled, 32768, "overflow|fallback|share"),
        (_doubled, 65536, "overflow|fallback|share"),
        (_without_a_loop, 2048, "no loop"),
        (_cumulative, 2048, "scalarised"),
    ],
)
def test_a_bad_kernel_is_seen(needs, version, kernel, block, problem):
    names = {text.split(":")[0] for text in planned(needs, version, kernel, block).problems()}
    assert names & set(problem.split("|")), names


@each_version
def test_a_load_without_a_second_buffer_is_seen(needs, version):
    arguments = tuple(
        argument.replace("multi-buffer=True", "multi-buffer=False") for argument in ARGUMENTS
    )
    assert arguments != ARGUMENTS
    problems = planned(needs, version, _doubled, 2048, arguments).problems()
    assert [text.split(":")[0] for text in problems] == ["single-buffered"]


@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (_over_the_first_of_three_axes, ["leading axis"] * 2),
        (_over_other_axes, []),
        (_with_a_mask_of_data, ["whole store"]),
        (_in_place, []),
        (_with_a_masked_number, ["masked number"]),
        (_with_a_number, []),
        (_with_an_atomic, ["atomic"]),
    ],
)
def test_what_users_report_is_seen(kernel, names):
    result = lowered(kernel, 64)
    assert not result.error
    assert [text.split(":")[0] for text in reported(result.mlir)] == names


def test_a_kernel_that_does_not_lower_is_seen():
    assert "it does not lower" in lowered(_that_does_not_lower, 64).error


@pytest.mark.parametrize("chip", OTHER_CHIPS)
@each_version
def test_other_chips_are_planned(needs, version, chip):
    needs(missing_compiler(version))
    if not compiler(version, chip).exists():
        pytest.skip(f"ascendnpu-ir {version} has no compiler for {chip}")
    arguments = (f"{TARGET}{chip}", *ARGUMENTS[1:])
    fits = plan(lowered(_doubled, 2048).mlir, version, arguments)
    assert not fits.error and not fits.overflow_bits and not fits.fell_back
    # At least x's and y's tile.
    assert fits.ub_bytes >= 2 * 2048 * 4
    assert plan(lowered(_doubled, 65536).mlir, version, arguments).overflow_bits


def test_the_target_is_an_ascend_device():
    assert BACKEND.target.backend == "npu"
