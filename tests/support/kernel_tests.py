"""Tests of an op's kernels that many ops share. Each function makes one test.

The first argument of each parametrises the test: every_folder(op) or every_form(name).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

import op_checks
import strategies
from op_table import OPS
from op_under_test import FOLDERS, Case, OpUnderTest

Test = Callable[..., None]


def every_folder(op: OpUnderTest) -> pytest.MarkDecorator:
    """Parametrise with `op` and `folder`, for the kernels of an op with one form."""
    kernels = [pytest.param(op, folder, id=folder) for folder in FOLDERS]
    return pytest.mark.parametrize(("op", "folder"), kernels)


def every_form(name: str) -> pytest.MarkDecorator:
    """Parametrise with `op` and `folder`, for all forms of an op; test ids name the form."""
    kernels = [
        pytest.param(op, folder, id=f"{op.id}-{folder}")
        for op in OPS.values()
        if op.name == name
        for folder in FOLDERS
    ]
    return pytest.mark.parametrize(("op", "folder"), kernels)


def forward_matches_truth(kernels: pytest.MarkDecorator, cases: SearchStrategy[Case]) -> Test:
    @pytest.mark.device_kernels
    @kernels
    @given(case=cases)
    def test_forward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
        op_checks.assert_forward_matches_truth(op, folder, case)

    return test_forward_matches_truth


def backward_matches_truth(kernels: pytest.MarkDecorator, cases: SearchStrategy[Case]) -> Test:
    @pytest.mark.device_kernels
    @kernels
    @given(case=cases)
    def test_backward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
        op_checks.assert_backward_matches_truth(op, folder, case)

    return test_backward_matches_truth


def properties(kernels: pytest.MarkDecorator, cases: SearchStrategy[Case]) -> Test:
    """Test properties of the cases with several rows."""

    @pytest.mark.device_kernels
    @kernels
    @settings(max_examples=settings().max_examples // 3)
    @given(case=cases.filter(strategies.has_rows))
    def test_properties(op: OpUnderTest, folder: str, case: Case) -> None:
        op_checks.assert_deterministic(op, folder, case)
        op_checks.assert_tile_does_not_matter(op, folder, case)
        op_checks.assert_rows_are_independent(op, folder, case)

    return test_properties


def cases_match_truth(kernels: pytest.MarkDecorator, cases: Mapping[str, Case]) -> Test:
    """Test forward and backward in each of these cases, keyed by test id."""

    @pytest.mark.device_kernels
    @kernels
    @pytest.mark.parametrize("case", cases.values(), ids=cases.keys())
    def test_cases_match_truth(op: OpUnderTest, folder: str, case: Case) -> None:
        op_checks.assert_forward_matches_truth(op, folder, case)
        op_checks.assert_backward_matches_truth(op, folder, case)

    return test_cases_match_truth
