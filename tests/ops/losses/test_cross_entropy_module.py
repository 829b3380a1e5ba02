"""CrossEntropyLoss agrees with torch's, and returns additional results on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from cross_entropy_cases import TERMS
from liger_ops.nn import CrossEntropyLoss, CrossEntropyOutput

EXTRAS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_entropy")


def test_module_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(6, 5, generator=generator), torch.tensor([0, 1, 2, -1, 4, 0])
    weight = torch.rand(5, generator=generator)
    kwargs: dict[str, Any] = {"ignore_index": -1, "reduction": "sum", "label_smoothing": 0.2}
    ours, theirs = CrossEntropyLoss(weight, **kwargs), torch.nn.CrossEntropyLoss(weight, **kwargs)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    assert repr(ours) == ("CrossEntropyLoss(ignore_index=-1, reduction='sum', label_smoothing=0.2)")


@pytest.mark.parametrize("wanted", EXTRAS)
def test_module_returns_what_it_is_asked_for(wanted: str) -> None:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    target = x.argmax(-1)
    target[0, 0] = -100
    target[0, 1] = (target[0, 1] + 1) % 5
    output = CrossEntropyLoss(**TERMS, **{wanted: True})(x, target)
    assert isinstance(output, CrossEntropyOutput)
    loss, z_loss, *_, entropy, _ = liger_ops.cross_entropy_forward(
        x, target, **TERMS, return_entropy=True
    )
    expected = {
        "return_z_loss": z_loss,
        "return_token_accuracy": torch.tensor(6 / 7),
        "return_predicted_tokens": x.argmax(-1),
        "return_entropy": entropy,
    }
    assert torch.equal(output.loss, loss)
    for name in EXTRAS:
        value = getattr(output, name.removeprefix("return_"))
        if name == wanted:
            torch.testing.assert_close(value, expected[name])
        else:
            assert value is None


@pytest.mark.parametrize("items", (4, 4.0, torch.tensor(4), torch.tensor(4.0)))
def test_module_divides_by_the_items(items: Tensor | float) -> None:
    x, target = torch.randn(3, 5), torch.tensor([0, 1, -100])
    loss = CrossEntropyLoss()(x, target, num_items_in_batch=items)
    torch.testing.assert_close(loss, F.cross_entropy(x, target, reduction="sum") / 4)
