"""log_softmax against float64 truth, and against torch.nn.functional.log_softmax."""

from __future__ import annotations

import torch
from torch import Tensor

import liger_ops
import softmax_checks
from op_table import OPS

OP = OPS["log_softmax"]


def widened_log_softmax(x: Tensor) -> Tensor:
    """ATen's CPU log_softmax in half precision rounds in between unless it is given float32."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return torch.nn.functional.log_softmax(x, -1, dtype=wide).to(x.dtype)


test_infinities = softmax_checks.infinities(
    OP, torch.nn.functional.log_softmax, torch.ops.aten._log_softmax_backward_data
)
test_agrees_with_aten = softmax_checks.agrees_with_aten(liger_ops.log_softmax, widened_log_softmax)
test_module_is_torchs = softmax_checks.module_is_torchs(
    liger_ops.nn.LogSoftmax, torch.nn.LogSoftmax
)


def test_rejects() -> None:
    softmax_checks.assert_rejects(liger_ops.nn.LogSoftmax, "LogSoftmax")
