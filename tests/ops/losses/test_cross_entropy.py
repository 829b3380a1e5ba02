"""cross_entropy's kernels of both devices against float64 truth."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import op_checks
import strategies
from liger_ops import library
from liger_ops.lowering.common.losses.cross_entropy import TokenTensors
from liger_ops.rewrites.losses.losses import NO_CLASS
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, NAN
from plans import plan

OP = OPS["cross_entropy_forward-mean"]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_what_the_rewrites_of_losses_of_tokens_ask_for(folder: str) -> None:
    """A target that none is, and nothing but smoothing."""
    case = OP.case(
        shape=(3, 5, 37), dtype=torch.bfloat16, ignored=0, ignore_index=NO_CLASS, reduction="none",
        label_smoothing=1.0,
    )  # fmt: skip
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.cases(OP))
def test_predictions_and_entropy(folder: str, case: Any) -> None:
    case = replace(case, return_predicted=True, return_entropy=True)
    args = OP.forward_args(case, OP.tensors(case))
    *_, predicted, entropy, _ = op_checks.run_kernel(OP, folder, False, case, args)
    logits = args[0]
    assert torch.equal(predicted, logits.argmax(-1))
    x = logits.double() * case.logit_scale
    x = x if case.softcap is None else case.softcap * torch.tanh(x / case.softcap)
    truth = torch.distributions.Categorical(logits=x).entropy() if x.numel() else x.sum(-1)
    truth[args[1] == case.ignore_index] = 0
    torch.testing.assert_close(entropy.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.cases(OP))
@settings(max_examples=settings().max_examples // 2)
def test_loss_and_gradient_in_one_call(folder: str, case: Any) -> None:
    """linear_cross_entropy calls this for each chunk of logits; the gradient overwrites them."""
    V = case.shape[-1]
    case = replace(case, shape=(5, V), reduction="none", layout="contiguous", has_items=False)
    tensors = OP.tensors(case)
    logits, target, weight, token_weight, _ = (tensors[name] for name in OP.tensor_arguments[:5])
    outputs = {
        name: torch.full((5,), NAN, device=DEVICE)
        for name in ("loss", "z_loss", "lse", "target_logit")
    }
    chunk = logits.clone()
    module = importlib.import_module(f"liger_ops.lowering.{folder}.losses.cross_entropy")
    args = OP.forward_args(case, tensors)
    tokens = TokenTensors(weight, target, token_weight, **outputs)
    call = library.OPS[OP.name].arguments(*args)
    module.loss_and_gradient(call, chunk, tokens, True, plan(folder, OP, case))
    kernel = op_checks.run_kernel(OP, folder, False, case, args)
    for name, expected in zip(("loss", "z_loss", "lse", "target_logit"), kernel[:4], strict=True):
        torch.testing.assert_close(outputs[name], expected, equal_nan=True)
    ones = {"dloss": torch.ones(5, device=DEVICE), "dz_loss": None, "dlse": None}
    upstream = {**tensors, **ones, "dtarget_logit": None}
    args = OP.backward_args(
        case, {**upstream, "lse": kernel[2], "total_weight": kernel[4], "lse_error": kernel[7]}
    )
    (expected,) = op_checks.run_kernel(OP, folder, True, case, args)
    bound = 4 * torch.finfo(case.dtype).eps
    # A compiler contracts the two kernels' products and sums in other ways.
    contracted = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(chunk, expected, rtol=bound, atol=max(bound * 1e-2, contracted))
