"""softmax against float64 truth, and against torch.nn.functional.softmax."""

from __future__ import annotations

import torch

import kernel_tests
import liger_ops
import softmax_checks
import strategies
from op_table import OPS

OP = OPS["softmax"]
KERNELS = kernel_tests.every_folder(OP)

test_forward_matches_truth = kernel_tests.forward_matches_truth(KERNELS, strategies.softmaxes())
test_backward_matches_truth = kernel_tests.backward_matches_truth(KERNELS, strategies.softmaxes())
test_properties = kernel_tests.properties(KERNELS, strategies.softmaxes())
test_wide_rows_by_the_host_codes_own_plan = kernel_tests.cases_match_truth(
    KERNELS, softmax_checks.WIDE_ROWS
)
test_infinities = softmax_checks.infinities(
    KERNELS, torch.nn.functional.softmax, torch.ops.aten._softmax_backward_data
)
test_agrees_with_aten = softmax_checks.agrees_with_aten(
    liger_ops.softmax, lambda x: torch.nn.functional.softmax(x, -1)
)
test_module_is_torchs = softmax_checks.module_is_torchs(liger_ops.nn.Softmax, torch.nn.Softmax)


def test_rejects() -> None:
    softmax_checks.assert_rejects(OP, liger_ops.nn.Softmax, "Softmax")
