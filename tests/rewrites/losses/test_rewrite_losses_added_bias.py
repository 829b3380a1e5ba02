"""Heads whose bias is added to their logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

from architectures import NEW
from loss_spellings import S, V, head_inputs, plain
from rewriting import check, each_dtype

ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bart": lambda logits, bias: logits + bias.view(1, V),
    "commuted": lambda logits, bias: bias + logits,
    "then-scaled": lambda logits, bias: (logits + bias) * 0.5,
}


@each_dtype
@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_a_bias_that_is_added_to_the_logits(add, dtype):
    def function(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(add(F.linear(x, weight), bias).view(-1, V), target.view(-1))

    x, weight, target = head_inputs(dtype)
    bias = torch.linspace(-1, 1, V).to(dtype).requires_grad_()
    found = check(function, x, weight, bias, target, counts={"linear_cross_entropy": 1})
    assert found.calls("linear_cross_entropy")[0]["bias"] is not None
    own = lambda x, weight, bias, target: (
        function(x, weight, bias, target)
        + F.cross_entropy(add(F.linear(x, weight, bias), bias).view(-1, V), target.view(-1))
    )
    check(own, x, weight, bias, target, counts={"linear_cross_entropy": 2})


@pytest.mark.parametrize(
    ("other", "reason"),
    (
        (lambda logits: torch.ones(V, dtype=torch.bfloat16), "bfloat16"),
        (lambda logits: logits.detach().sin(), "not have one number per class"),
        (lambda logits: torch.ones(S, 1), "not have one number per class"),
    ),
    ids=("dtype", "residual", "position"),
)
def test_what_is_added_and_is_no_bias(other, reason):
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return plain(logits + other(logits), target)

    found = check(function, *head_inputs(), counts={"cross_entropy": 1})
    assert reason in found.reasons("linear_cross_entropy")[0]


def test_a_bias_that_autocast_does_not_cast():
    """The op would cast the added bias, as the head casts its own bias."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(F.linear(x, weight) + bias, target)

    x, weight, target = head_inputs()
    found = check(function, x, weight, torch.randn(V), target, counts={"cross_entropy": 1})
    assert "torch.float32 is added to logits in" in found.reasons("linear_cross_entropy")[0]


@pytest.mark.skipif(not NEW, reason="Dynamo does not trace this BART whole, rewritten or not")
def test_bart():
    """The added bias is a buffer, (1, V), and the labels are not shifted."""
    torch.manual_seed(0)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
    config = BartConfig(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8, use_cache=False)
    model = BartForConditionalGeneration(config)
    model.final_logits_bias.normal_()

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=target).loss

    ids = torch.arange(10).view(2, 5) + 4
    target = ids.masked_fill(ids % 3 == 0, -100)
    names = ["linear_cross_entropy"]
    check(Step(), ids, target, counts={"linear_cross_entropy": 1}, names=names)
