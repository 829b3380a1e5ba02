"""log_softmax against float64 truth, and against torch.nn.functional.log_softmax."""

from __future__ import annotations

import torch
from torch import Tensor

import kernel_tests
import liger_ops
import softmax_checks
import strategies
from op_table import OPS

OP = OPS["log_softmax"]
KERNELS = kernel_tests.every_folder(OP)


def widened_log_softmax(x: Tensor) -> Tensor:
    """ATen's CPU log_softmax in half precision rounds in between unless it is given float32."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return torch.nn.functional.log_softmax(x, -1, dtype=wide).to(x.dtype)


test_forward_matches_truth = kernel_tests.forward_matches_truth(KERNELS, strategies.softmaxes())
test_backward_matches_truth = kernel_tests.backward_matches_truth(KERNELS, strategies.softmaxes())
test_properties = kernel_tests.properties(KERNELS, strategies.softmaxes())
test_wide_rows_by_the_host_codes_own_plan = kernel_tests.cases_match_truth(
    KERNELS, softmax_checks.WIDE_ROWS
)
test_infinities = softmax_checks.infinities(
    KERNELS, torch.nn.functional.log_softmax, torch.ops.aten._log_softmax_backward_data
)
test_agrees_with_aten = softmax_checks.agrees_with_aten(liger_ops.log_softmax, widened_log_softmax)
test_module_is_torchs = softmax_checks.module_is_torchs(
    liger_ops.nn.LogSoftmax, torch.nn.LogSoftmax
)


def test_rejects() -> None:
    softmax_checks.assert_rejects(OP, liger_ops.nn.LogSoftmax, "LogSoftmax")
