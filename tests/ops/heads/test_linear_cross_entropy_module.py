"""LinearCrossEntropyLoss agrees with the op, and returns additional results on request."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import liger_ops
from cross_entropy_cases import TERMS
from head_calls import FORWARD, Calls, call, leaves
from liger_ops.nn import CrossEntropyOutput, LinearCrossEntropyLoss
from linear_cross_entropy_cases import HeadCase


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_module_gives_what_the_op_gives(dtype: torch.dtype) -> None:
    case = HeadCase(dtype=dtype, class_weight=True, token_weight=True, **TERMS)
    args, tensors = leaves(case)
    x, weight, target, bias, class_weight, token_weight, _, *options = args
    named = {**TERMS, "chunk_bytes": options[-1]}
    plain = LinearCrossEntropyLoss(class_weight, **named)
    asked = LinearCrossEntropyLoss(
        class_weight, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
        return_entropy=True, **named,
    )  # fmt: skip
    expected = FORWARD.definition(*args, True, True)
    gradients = torch.autograd.grad(call(args), tensors)
    loss = plain(x, weight, target, bias, token_weight)
    output = asked(x, weight, target, bias, token_weight)
    compiled = torch.compile(asked, fullgraph=True, backend="aot_eager")
    for result in (output, compiled(x, weight, target, bias, token_weight)):
        assert isinstance(result, CrossEntropyOutput)
        assert torch.equal(result.loss, loss)
        torch.testing.assert_close(result.z_loss, expected[1])
        assert torch.equal(result.predicted_tokens, expected[5])
        torch.testing.assert_close(result.entropy, expected[6])
        kept = target != -100
        hits = (F.linear(x, weight, bias).argmax(-1) == target)[kept]
        assert float(result.token_accuracy) == pytest.approx(float(hits.double().mean()))
    for result in (loss, output.loss):
        for a, b in zip(torch.autograd.grad(result, tensors), gradients, strict=True):
            assert torch.equal(a, b)
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        asked(x.float(), weight.float(), target, bias.float(), token_weight)
    (arguments,) = calls.arguments("linear_cross_entropy_forward")
    assert {arguments[i].dtype for i in (0, 1, 3)} == {torch.bfloat16}


def test_module_takes_the_items_of_a_batch() -> None:
    args, _ = leaves(HeadCase(dtype=torch.float64))
    x, weight, target, bias = args[:4]
    expected = liger_ops.linear_cross_entropy(x, weight, target, bias, reduction="sum") / 12
    for items in (12, 12.0, torch.tensor(12)):
        loss = LinearCrossEntropyLoss()(x, weight, target, bias, num_items_in_batch=items)
        torch.testing.assert_close(loss, expected)


def test_module_says_its_options() -> None:
    module = LinearCrossEntropyLoss(reduction="sum", softcap=30.0, chunk_bytes=2**20)
    assert (
        repr(module) == "LinearCrossEntropyLoss(reduction='sum', softcap=30.0, chunk_bytes=1048576)"
    )
    assert repr(LinearCrossEntropyLoss()) == "LinearCrossEntropyLoss()"
    with pytest.raises(ValueError, match="chunk_bytes must be above 0 or None, got 0"):
        LinearCrossEntropyLoss(chunk_bytes=0)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LinearCrossEntropyLoss(reduction="average")
