"""softmax against float64 truth, and against torch.nn.functional.softmax."""

from __future__ import annotations

import torch

import liger_ops
import softmax_checks
from op_table import OPS

OP = OPS["softmax"]

test_infinities = softmax_checks.infinities(
    OP, torch.nn.functional.softmax, torch.ops.aten._softmax_backward_data
)
test_agrees_with_aten = softmax_checks.agrees_with_aten(
    liger_ops.softmax, lambda x: torch.nn.functional.softmax(x, -1)
)
test_module_is_torchs = softmax_checks.module_is_torchs(liger_ops.nn.Softmax, torch.nn.Softmax)


def test_rejects() -> None:
    softmax_checks.assert_rejects(liger_ops.nn.Softmax, "Softmax")
