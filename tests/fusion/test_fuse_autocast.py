"""`fuse` in autocast, and a fused model in autocast."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from called_ops import Calls
from fused_families import Family, output
from fused_models import FAMILY, GPT_OSS, LLAMA, gradient_of, results
from liger_ops.fusion import fuse


@pytest.mark.parametrize("family", [LLAMA, GPT_OSS], ids=lambda family: family.name)
def test_finds_the_same_inside(family: Family) -> None:
    expected = fuse(family.model())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fuse(family.model()) == expected
    assert Counter(entry.op for entry in expected.fused) == family.parts


def gradients_in_autocast(model: Any, x: Tensor) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = output(model, x)
    model.zero_grad()
    y.backward(gradient_of(y))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": y.detach(), **{name: g for name, g in grads.items() if g is not None}}


@FAMILY
def test_every_op_runs_with_the_results_of_the_model(family: Family) -> None:
    """With bfloat16 queries and float32 tables, rope runs too, and its results are float32."""
    model, untouched = family.model(), family.model()
    fuse(model)
    x = family.inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), Calls() as calls, torch.no_grad():
        output(model, x)
    assert calls.counts == family.forwards
    truth = results(family.model(), x)
    before = gradients_in_autocast(untouched, x)
    after = gradients_in_autocast(model, x)
    assert after.keys() == before.keys() == truth.keys()
    for name, true in truth.items():
        assert after[name].dtype is before[name].dtype
        error, error_before = ((found[name] - true).norm() for found in (after, before))
        # One rounding of every number to bfloat16, in addition to the error of autocast.
        assert error <= 2 * error_before + 2**-8 * true.norm()
