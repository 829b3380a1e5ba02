"""`fuse` on the load-balancing loss of mixture models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.doge import modeling_doge
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as of_mixtral
from transformers.models.nllb_moe import modeling_nllb_moe

from called_ops import called
from liger_ops import fuse, unfuse

ROUTERS, EXPERTS = 3, 6


def of_the_mean(
    gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Any = None
) -> Tensor:
    return 1.1 * of_mixtral(gate_logits, num_experts, top_k, attention_mask)


load_balancing_loss_func: Callable[..., Any] = of_mixtral


class Model(nn.Module):
    def forward(self, routers: Any, mask: Tensor | None = None, **options: Any) -> Any:
        return load_balancing_loss_func(routers, EXPERTS, 2, mask, **options)


@pytest.fixture
def model(request: Any, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    function = getattr(request, "param", of_mixtral)
    monkeypatch.setattr(sys.modules[__name__], "load_balancing_loss_func", function)
    return Model()


def routers(dtype: torch.dtype = torch.float32, tokens: int = 8) -> tuple[Tensor, ...]:
    return tuple(torch.randn(tokens, EXPERTS).to(dtype).requires_grad_() for _ in range(ROUTERS))


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [None, MASK, MASK.bool(), MASK.float()])
@pytest.mark.parametrize(
    "model", [of_mixtral, modeling_nllb_moe.load_balancing_loss_func], indirect=True
)
def test_the_loss(model: nn.Module, mask: Tensor | None) -> None:
    given = routers()
    expected = model(given, mask)
    assert fuse(model).counts() == {"router_losses": 1}
    assert fuse(model).counts() == {}
    (loss,), ops = called(model, given, mask)
    assert ops["router_losses_forward"] == 1
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, given) for one in (loss, expected)))
    assert unfuse(model) == 1


def test_what_the_op_does_not_compute(model: nn.Module) -> None:
    """No layers, layers of other lengths, and float64, which the function returns as float32."""
    untouched = Model()
    fuse(model)
    assert model(None) == untouched(None) == 0
    given = routers()
    # A mask of other tokens: the function's own error, whatever the op would say.
    for mask in (MASK[:, 1:3], MASK.repeat(3, 1)):
        with pytest.raises(RuntimeError) as expected:
            untouched(given, mask)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            model(given, mask)
    uneven = (*routers(), *routers(tokens=5))
    assert torch.equal(model(uneven), untouched(uneven))
    assert torch.equal(model(uneven[:3], MASK.double()), untouched(uneven[:3], MASK.double()))
    wide = routers(torch.float64)
    assert model(wide).dtype == untouched(wide).dtype == torch.float32
    torch.testing.assert_close(model(wide), untouched(wide))


def test_a_function_that_is_replaced_later_is_called(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse(model)
    monkeypatch.setattr(sys.modules[__name__], "load_balancing_loss_func", of_the_mean)
    given = routers()
    assert torch.equal(model(given), of_the_mean(given, EXPERTS))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (of_the_mean, "computes another loss than router_losses"),
        (modeling_doge.load_balancing_loss_func, "takes (gate_logits, num_experts, num_keys, "),
    ],
    indirect=["model"],
)
def test_near_misses(model: nn.Module, reason: str) -> None:
    report = fuse(model)
    assert not report and len(report.left) == 1
    assert report.left[0].reason.startswith(f"load_balancing_loss_func {reason}")
