"""clamped_swiglu against float64 truth, and against the models' code that it replaces."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import activation_checks
import liger_ops
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_agrees_with_the_models_code(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=16, intermediate_size=40, num_local_experts=2)
    experts = GptOssExperts(config)
    gate_up = torch.nn.Parameter((torch.randn(7, 80) * 6).to(dtype))
    experts.gate_up = gate_up
    activation_checks.assert_model_may_be_replaced(
        lambda: experts._apply_gate(gate_up),
        lambda: liger_ops.clamped_swiglu(
            gate_up, alpha=experts.alpha, limit=experts.limit, interleaved=True
        ),
        experts,
    )
    assert float((gate_up.abs() > experts.limit).float().mean()) > 0.1


def test_the_forms_are_one() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(3, 6) * 5, torch.randn(3, 6) * 5
    y = liger_ops.clamped_swiglu(gate, up)
    side_by_side = torch.cat((gate, up), -1)
    pairs = torch.stack((gate, up), -1).flatten(-2)
    assert torch.equal(y, liger_ops.clamped_swiglu(side_by_side))
    assert torch.equal(y, liger_ops.clamped_swiglu(pairs, interleaved=True))


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_on_the_limit_the_gradient_is_the_insides(folder: str) -> None:
    limit = 7.0
    gate = torch.tensor([limit, 1.0, 1.0, 7.5, 1.0]).to(DEVICE)
    up = torch.tensor([1.0, limit, -limit, 1.0, -7.5]).to(DEVICE)
    kernel = OPS["clamped_swiglu"].kernel(folder, backward=True)
    dy = torch.ones_like(gate)
    dgate, dup = kernel(dy, gate, up, 1.702, limit, 1.0, False, [True, True])
    assert (dgate != 0).tolist() == [True, True, True, False, True]
    assert (dup != 0).tolist() == [True, True, True, True, False]
