"""Every op's kernels of both devices against float64 truth, in the cases of its entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import strategies
from divergence_cases import COSINE
from liger_ops import library
from op_checks import (
    as_tuple,
    assert_backward_matches_truth,
    assert_deterministic,
    assert_forward_matches_truth,
    assert_rows_are_independent,
    assert_tile_does_not_matter,
    run_kernel,
)
from op_table import OPS
from op_under_test import FOLDERS, OpUnderTest, nothing

# Forms that have the same cases are one; heads have tests of their own.
ENTRIES = {
    (op.name, op.tensors): op
    for op in reversed(OPS.values())
    if op.output_magnitudes is not nothing
}
DRAWN = [*reversed(ENTRIES.values()), COSINE]


def kernels(ops: list[OpUnderTest]) -> pytest.MarkDecorator:
    given = [pytest.param(op, folder, id=f"{op.id}-{folder}") for op in ops for folder in FOLDERS]
    return pytest.mark.parametrize(("op", "folder"), given)


# The interpreter is NumPy, which warns of the infinities that some cases have on purpose.
pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.usefixtures("without_tf32"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@kernels(DRAWN)
@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
def test_drawn_cases_match_truth(op: OpUnderTest, folder: str, backward: bool) -> None:
    check = assert_backward_matches_truth if backward else assert_forward_matches_truth
    strategies.for_cases(op, lambda case: check(op, folder, case))


@kernels(DRAWN)
def test_properties(op: OpUnderTest, folder: str) -> None:
    def check(case: Any) -> None:
        assert_deterministic(op, folder, case)
        assert_tile_does_not_matter(op, folder, case)
        if op.per_row and op.rows_permute(case):
            assert_rows_are_independent(op, folder, case)

    strategies.for_cases(op, check, fewer=4, drawn=strategies.cases(op).filter(strategies.has_rows))


@pytest.mark.parametrize(
    ("op", "folder", "name"),
    [
        pytest.param(op, folder, name, id=f"{op.id}-{folder}-{name}")
        for op in DRAWN
        for folder in FOLDERS
        for name in op.cases
    ],
)
def test_cases_match_truth(op: OpUnderTest, folder: str, name: str) -> None:
    case = op.case(**op.cases[name])
    assert_forward_matches_truth(op, folder, case)
    assert_backward_matches_truth(op, folder, case)


ELEMENTWISE = [op for op in DRAWN if op.elementwise]


@kernels(ELEMENTWISE)
def test_a_nan_stays_one(op: OpUnderTest, folder: str) -> None:
    def run(case: Any, backward: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return run_kernel(op, folder, backward, case, args)

    assert_a_nan_stays_one(op, run)


@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.id)
def test_a_nan_stays_one_in_the_definition(op: OpUnderTest) -> None:
    """Autograd of `relu` and `clamp` hides a NaN, because their slopes there are 1 and 0."""

    def run(case: Any, backward: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
        name = op.backward_name if backward else op.name
        return as_tuple(library.OPS[name].definition(*args))

    assert_a_nan_stays_one(op, run)


def assert_a_nan_stays_one(op: OpUnderTest, run: Callable[..., tuple[Any, ...]]) -> None:
    """Check that every result and gradient that depends on a NaN is NaN."""
    case = op.sample(torch.float32, rows=1)
    for name in op.gradients_of:
        tensors = op.tensors(case)
        if tensors[name] is None:
            continue
        tensors[name].fill_(float("nan"))
        outputs = run(case, False, op.forward_args(case, tensors))
        gradients = run(case, True, op.backward_args(case, tensors))
        for output in outputs + gradients:
            # The gradient of up depends on gate alone.
            if output is not None and not (name == "up" and output is gradients[1]):
                assert bool(output.isnan().all()), (op.id, name)
