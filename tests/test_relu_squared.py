"""relu_squared against float64 truth, and against the code that people replace with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from transformers.activations import ACT2FN

import activation_checks
import liger_ops
import op_checks
import strategies
from activations import ActivationCase
from op_table import OPS
from op_under_test import DEVICE, FOLDERS, OpUnderTest

EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
EVERY_FORM = pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.id) for op in OPS.values() if op.name == "relu_squared"]
)
# The interpreter is NumPy, which warns of the infinities that the arithmetic is made for.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_FORM
@given(case=strategies.activations())
def test_forward_matches_truth(op: OpUnderTest, folder: str, case: ActivationCase) -> None:
    op_checks.assert_forward_matches_truth(op, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_FORM
@given(case=strategies.activations())
def test_backward_matches_truth(op: OpUnderTest, folder: str, case: ActivationCase) -> None:
    op_checks.assert_backward_matches_truth(op, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_FORM
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.activations().filter(strategies.has_rows))
def test_properties(op: OpUnderTest, folder: str, case: ActivationCase) -> None:
    op_checks.assert_deterministic(op, folder, case)
    op_checks.assert_tile_does_not_matter(op, folder, case)
    op_checks.assert_rows_are_independent(op, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_FORM
@pytest.mark.parametrize(("columns", "layout"), ((14336, "contiguous"), (20011, "sliced")))
def test_wide_rows_by_the_host_codes_own_plan(
    op: OpUnderTest, folder: str, columns: int, layout: str
) -> None:
    case = ActivationCase(shape=(3, columns), dtype=torch.bfloat16, layout=layout)
    op_checks.assert_forward_matches_truth(op, folder, case)
    op_checks.assert_backward_matches_truth(op, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_FORM
def test_a_nan_stays_one(op: OpUnderTest, folder: str) -> None:
    activation_checks.assert_nan_stays(op, folder)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_is_the_models_code(dtype: torch.dtype) -> None:
    """Bit for bit: of the two operations only the square is rounded."""
    torch.manual_seed(0)
    x = torch.randn(5, 33).to(dtype)
    assert torch.equal(liger_ops.relu_squared(x), ACT2FN["relu2"](x))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    liger_ops.relu_squared(ours).sum().backward()
    ACT2FN["relu2"](theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_any_shape(folder: str) -> None:
    for shape in ((), (1,), (0, 5), (5, 0), (2, 3, 1, 5, 1)):
        x = torch.randn(shape).to(DEVICE)
        forward = OPS["relu_squared"].kernel(folder)
        backward = OPS["relu_squared"].kernel(folder, backward=True)
        assert torch.equal(forward(x), x.relu().square())
        torch.testing.assert_close(backward(x, x), 2 * x.relu() * x)
