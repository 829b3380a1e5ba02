"""An index that is out of range is an error on a CPU, which names the op that was called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
from liger_ops import library

X, WEIGHT, LOGITS = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, 5)
TARGET, WORDS = torch.tensor([0, 3]), torch.tensor([[0, 1], [4, 2]])
LOG_Q, ONES = torch.full((2, 2), -1.0), torch.ones(2)
OF_TARGETS = "target must be ignore_index, -100, or from 0 to 4"
OF_WORDS = f"target and words{OF_TARGETS.removeprefix('target')}"

Call = Callable[[Tensor, Tensor], Any]
# (op, argument) -> a call of the op with an input and this argument, which of the tensors above the
# argument is, and what the message says of it.
CALLS: dict[tuple[str, str], tuple[Call, Tensor, str]] = {
    ("cross_entropy", "target"): (
        lambda x, target: liger_ops.cross_entropy(x @ WEIGHT.T, target), TARGET, OF_TARGETS
    ),
    ("log_prob", "target"): (
        lambda x, target: liger_ops.log_prob(x @ WEIGHT.T, target), WORDS, OF_TARGETS
    ),
    ("linear_cross_entropy", "target"): (
        lambda x, target: liger_ops.linear_cross_entropy(x, WEIGHT, target), TARGET, OF_TARGETS
    ),
    ("linear_log_prob", "target"): (
        lambda x, target: liger_ops.linear_log_prob(x, WEIGHT, target), TARGET, OF_TARGETS
    ),
    ("linear_divergence", "target"): (
        lambda x, target: liger_ops.linear_divergence(
            x, WEIGHT, teacher_logits=LOGITS, target=target, hard_weight=0.5
        ),
        TARGET, OF_TARGETS,
    ),
    ("linear_score_centering", "target"): (
        lambda x, target: liger_ops.linear_score_centering(x, WEIGHT, target, WORDS, LOG_Q, ONES),
        TARGET, OF_WORDS,
    ),
    ("linear_score_centering", "words"): (
        lambda x, words: liger_ops.linear_score_centering(x, WEIGHT, TARGET, words, LOG_Q, ONES),
        WORDS, OF_WORDS,
    ),
    ("linear_top_k_divergence", "teacher_ids"): (
        lambda x, ids: liger_ops.linear_top_k_divergence(x, WEIGHT, ids, LOG_Q),
        WORDS, "teacher_ids must be negative, or from 0 to 4",
    ),
    ("embedding", "indices"): (
        lambda x, indices: liger_ops.embedding(WEIGHT, indices), WORDS,
        "indices must be from 0 to 4",
    ),
}  # fmt: skip
# Integers that are not looked up, and ids of experts that a device does not have.
NO_INDICES = {
    ("divergence", "target"), ("jsd", "shift_labels"), ("tvd", "shift_labels"),
    ("varlen_attention", "cu_seqlens"), ("varlen_attention", "lengths"),
    ("moe_experts", "top_k_index"),
}  # fmt: skip


def test_every_index_is_listed() -> None:
    declared = {
        (op.name.removesuffix("_forward"), name)
        for op in library.OPS.values()
        for name in re.findall(r"(\w+)=[^,]*: int\b", op.axes.split("->")[0])
    }
    assert declared == {*CALLS, *NO_INDICES}


@pytest.mark.parametrize("way", ["eager", "with a gradient", "in a transform", "its op"])
@pytest.mark.parametrize(("op", "argument"), CALLS)
def test_an_index_out_of_range_is_named(op: str, argument: str, way: str) -> None:
    call, right, text = CALLS[op, argument]
    wrong = right.clone()
    wrong.view(-1)[-1] = 7
    x = X.clone().requires_grad_(way == "with a gradient")
    call(x, right)
    with pytest.raises(IndexError) as raised:
        if way == "in a transform":
            torch.func.vmap(lambda x: call(x, wrong))(X.expand(2, *X.shape))
        elif way == "its op":
            # The graph of a compiled model calls the operator, not the function.
            torch.compile(lambda x: call(x, wrong), backend="aot_eager")(x)
        else:
            call(x, wrong)
    assert str(raised.value).startswith(f"{op}: {text}, got one that is not: ")


def test_a_negative_index_that_is_not_ignored_is_named() -> None:
    with pytest.raises(IndexError, match=f"^linear_cross_entropy: {OF_TARGETS}, got .*-7"):
        liger_ops.linear_cross_entropy(X, WEIGHT, torch.tensor([0, -7]))


def test_a_row_of_an_empty_embedding_is_out_of_range() -> None:
    with pytest.raises(IndexError, match="embedding: indices must be from 0 to -1"):
        liger_ops.embedding(torch.randn(0, 3), torch.tensor([0]))
