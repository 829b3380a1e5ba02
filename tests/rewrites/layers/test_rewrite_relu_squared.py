"""relu_squared, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gated_spellings import every_dtype
from rewriting import check, refused, values

RELUS_SQUARED: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: torch.square(F.relu(x)),
    "method": lambda x: x.relu().square(),
    "pow": lambda x: torch.relu(x).pow(2),
    "operator": lambda x: F.relu(x) ** 2,
    "pow-of-a-float": lambda x: torch.pow(F.relu(x, inplace=False), 2.0),
    "dropout-of-nothing": lambda x: F.dropout(F.relu(x), 0.0).square(),
}


@pytest.mark.quick(rewrites=("relu_squared",))
@every_dtype
@pytest.mark.parametrize("function", RELUS_SQUARED.values(), ids=RELUS_SQUARED)
def test_relu_squared(function, dtype):
    check(function, values(2, 3, 8, dtype=dtype), counts={"relu_squared": 1})


def test_relu_squared_by_a_product():
    def function(x: Tensor) -> Tensor:
        activation = F.relu(x)
        return activation * activation

    check(function, values(2, 3, 8), counts={"relu_squared": 1})


def test_relu_squared_of_any_number_of_rows():
    function = RELUS_SQUARED["square"]
    inputs, then = (values(2, 3, 8),), (values(4, 5, 8),)
    check(function, *inputs, then=then, counts={"relu_squared": 1}, dynamic=True)


def relu_also_used(x: Tensor) -> Any:
    activation = F.relu(x)
    return activation.square(), activation


def relu_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        activation = F.relu(x)
    return activation.square() * x


def relu_under_autocast(x: Tensor) -> Tensor:
    activation = F.relu(x)
    with torch.autocast("cpu", torch.bfloat16):
        return activation.square()


def relu_source_written(x: Tensor) -> Tensor:
    x = x * 1.0
    activation = F.relu(x)
    x.mul_(2)
    return activation.square() + x


NO_RELU_SQUARED: dict[str, tuple[Callable[..., Any], str]] = {
    "extra-user": (relu_also_used, "used elsewhere"),
    "no_grad": (relu_without_gradient, "different gradient or autocast modes"),
    "autocast": (relu_under_autocast, "different gradient or autocast modes"),
    "inplace": (lambda x: F.relu(x * 1.0, inplace=True).square(), ""),
    "source-written": (relu_source_written, "written in place"),
    "cube": (lambda x: F.relu(x).pow(3), ""),
    "relu6": (lambda x: F.relu6(x).square(), ""),
    "of-the-square": (lambda x: F.relu(x.square()), ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_RELU_SQUARED.values(), ids=NO_RELU_SQUARED)
def test_near_misses_of_relu_squared(function, reason):
    refused(function, values(2, 3, 8), op="relu_squared", reason=reason)


def test_relu_squared_of_integers():
    x = torch.arange(-3, 3)
    refused(RELUS_SQUARED["square"], x, op="relu_squared", reason="integers")


def test_relu_squared_in_a_wider_dtype():
    """The op of float32, whose result is rounded; not where the activation is rounded first."""
    x = values(2, 3, 8, dtype=torch.bfloat16)
    wide = lambda x: F.relu(x.float()).square().to(x.dtype)
    check(wide, x, counts={"relu_squared": 1})
    refused(lambda x: F.relu(x).float().square(), x, op="relu_squared", reason="casts")
