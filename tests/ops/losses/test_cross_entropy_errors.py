"""The errors of cross_entropy, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_ops
import op_checks
from liger_ops.nn import CrossEntropyLoss
from op_table import OPS

OP = OPS["cross_entropy_forward-mean"]
NAN = float("nan")


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


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"reduction": "max"}, "reduction must be one of 'none', 'mean', 'sum', got 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"lse_square_scale": -1.0}, "lse_square_scale must be a number of at least 0, got -1.0"),
        ({"softcap": 0.0}, "softcap must be a number above 0, got 0.0"),
        ({"logit_scale": NAN}, "logit_scale must be a number above 0, got nan"),
    ),
)
def test_rejects_options(change: dict[str, Any], message: str) -> None:
    case = OP.case(shape=(2, 5), dtype=torch.float32, **change)
    args = (
        torch.zeros(2, 5),
        torch.zeros(2, dtype=torch.int64),
        None,
        None,
        None,
        *OP.options(case),
    )
    op_checks.assert_rejects(OP, args, f"cross_entropy: {message}")
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        CrossEntropyLoss(**change)


def test_rejects() -> None:
    x, target = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    shape = "cross_entropy: target must have the shape of logits but for its last dimension"
    op_checks.assert_rejects(OP, (x, target[:1]), f"{shape}, (2,), got (1,)")
    op_checks.assert_rejects(
        OP,
        (torch.zeros(2, 0), target),
        "cross_entropy: logits must have at least one class, got (2, 0)",
    )
    op_checks.assert_rejects(
        OP,
        (x, target, None, None, torch.tensor(2), -100, "sum"),
        "cross_entropy: num_items_in_batch must be None but for the reduction 'mean', which"
        " divides by it, got one for 'sum'",
    )
    with pytest.raises(TypeError, match="target must be int64 or int32, got torch.float32"):
        liger_ops.cross_entropy(x, x)
    with pytest.raises(TypeError, match="num_items_in_batch must be a number or a tensor of one"):
        CrossEntropyLoss()(x, target, num_items_in_batch="4")
