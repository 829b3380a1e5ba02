"""The errors of cross_entropy, and their messages."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from liger_ops.nn import CrossEntropyLoss


def test_the_gradient_that_is_not_given_is_refused() -> None:
    x, target = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.int64)
    tensors = {
        "weight": torch.ones(3, requires_grad=True),
        "token_weight": torch.ones(2, requires_grad=True),
        "num_items_in_batch": torch.tensor(2.0, requires_grad=True),
    }
    for name, tensor in tensors.items():
        for logits in (x, x.detach()):
            with pytest.raises(ValueError, match=f"cross_entropy: {name} must not require"):
                liger_ops.cross_entropy(logits, target, **{name: tensor})
        with torch.no_grad():
            liger_ops.cross_entropy(x, target, **{name: tensor})


def test_items_are_a_number() -> None:
    with pytest.raises(TypeError, match="num_items_in_batch must be a number or a tensor of one"):
        CrossEntropyLoss()(torch.zeros(2, 5), torch.tensor([0, 1]), num_items_in_batch="4")
