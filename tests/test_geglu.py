"""geglu against float64 truth, and against the code that people replace with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from transformers import GemmaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP

import activation_checks
import liger_ops
import op_checks
import strategies
from activations import ActivationCase
from op_table import OPS
from op_under_test import FOLDERS, OpUnderTest

EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
EVERY_FORM = pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.id) for op in OPS.values() if op.name == "geglu"]
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


@pytest.mark.parametrize("approximate", ("tanh", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_agrees_with_the_models_code(dtype: torch.dtype, approximate: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16).to(dtype)
    act = "gelu_pytorch_tanh" if approximate == "tanh" else "gelu"
    gemma = GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=40)).to(dtype)
    # Gemma's code has "gelu" mean the approximation.
    gemma.act_fn = ACT2FN[act]
    activation_checks.assert_model_may_be_replaced(
        lambda: gemma(x),
        lambda: gemma.down_proj(
            liger_ops.geglu(gemma.gate_proj(x), gemma.up_proj(x), approximate=approximate)
        ),
        gemma,
    )


def test_rejects() -> None:
    gate = torch.zeros(2, 8)
    for args, message in (
        (
            (gate, gate, "quick"),
            "geglu: approximate must be one of 'tanh', 'none', got 'quick'",
        ),
        (
            (gate, torch.zeros(8)),
            "geglu: up must have the shape of gate, (2, 8), got (8,)",
        ),
    ):
        op_checks.assert_rejects(OPS["geglu"], args, message)
