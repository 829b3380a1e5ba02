"""layer_norm, found in the code of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norm_spellings import EPS, inverse_rms
from rewriting import check, each_dtype, refused, values


def cohere(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + EPS)
    return (weight.to(torch.float32) * wide).to(x.dtype)


def layer_norm_alone(x: Tensor, weight: Tensor) -> Tensor:
    return torch.layer_norm(x, (8,), None, None, EPS)


def layer_norm_of_both(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight=weight, bias=weight * 2, eps=EPS)


def cohere_otherwise(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - torch.mean(wide, dim=2, keepdim=True)
    rstd = 1 / torch.sqrt(EPS + (centred * centred).mean(-1, True))
    return (centred.mul(rstd) * weight.float()).type_as(x)


LAYER_NORMS = {
    "weight": lambda x, weight: F.layer_norm(x, (8,), weight, eps=EPS),
    "alone": layer_norm_alone,
    "weight-and-bias": layer_norm_of_both,
    "cohere": cohere,
    "cohere-otherwise": cohere_otherwise,
}


@pytest.mark.quick(rewrites=("layer_norm",))
@each_dtype
@pytest.mark.parametrize("function", LAYER_NORMS.values(), ids=LAYER_NORMS)
def test_layer_norm(function, dtype):
    found = check(
        function, values(2, 3, 8, dtype=dtype), values(8, dtype=dtype), counts={"layer_norm": 1}
    )
    (call,) = found.calls("layer_norm")
    assert call["eps"] == EPS
    assert (call["weight"] is None) == (function is layer_norm_alone)
    assert (call["bias"] is not None) == (function is layer_norm_of_both)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_module(bias):
    norm = nn.LayerNorm(8, eps=1e-3, bias=bias)
    (call,) = check(norm, values(2, 3, 8), counts={"layer_norm": 1}).calls("layer_norm")
    assert call["eps"] == 1e-3 and (call["bias"] is not None) == bias


@pytest.mark.parametrize("function", [layer_norm_of_both, cohere])
def test_layer_norm_of_any_number_of_rows(function):
    check(
        function, *(values(2, 3, 8), values(8)), then=(values(4, 5, 8), values(8)),
        counts={"layer_norm": 1}, dynamic=True,
    )  # fmt: skip


def centred_also_used(x: Tensor, weight: Tensor) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred * inverse_rms(centred)), centred.sum()


def centred_by_another_dimension(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + EPS))


def centred_in_place(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    mean = x.mean(-1, keepdim=True)
    x.mul_(2)
    centred = x - mean
    return weight * (centred * inverse_rms(centred))


def standard_deviation(x: Tensor, weight: Tensor) -> Tensor:
    # With N - 1, as in MPT's predecessors and the Annotated Transformer.
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS)


def cohere_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * ((x - mean) * torch.rsqrt(variance + EPS))


NO_LAYER_NORM = {
    "two-dimensions": (
        lambda x, weight: F.layer_norm(x, (3, 8), eps=EPS) * weight,
        "over 2 dimensions",
    ),
    "no_grad": (cohere_without_gradient, "different gradient or autocast modes"),
    "extra-user": (centred_also_used, "used elsewhere"),
    "other-dimension": (centred_by_another_dimension, "mean has -2"),
    "standard-deviation": (standard_deviation, ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_LAYER_NORM.values(), ids=NO_LAYER_NORM)
def test_near_misses_of_layer_norm(function, reason):
    """The code after the subtraction of the mean may still be an rms_norm."""
    counts = {"rms_norm": 1} if function is centred_also_used else {}
    x = values(3, 3, 8)
    refused(function, x, values(8), op="layer_norm", reason=reason, counts=counts)


def test_a_write_between_the_operations_of_layer_norm():
    x, weight = values(2, 3, 8).detach(), values(8).detach()
    counts = {"rms_norm": 1}
    refused(centred_in_place, x, weight, op="layer_norm", reason="in place", counts=counts)


def test_cohere_with_a_weight_of_heads():
    """Cohere's norm of queries has a weight for each head."""
    found = check(cohere, values(2, 3, 4, 8), values(4, 8), counts={})
    assert found.reasons("layer_norm") == ["the weight is not that of a row"]
