"""Near misses of rms_norm, which do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norm_spellings import EPS, gemma, inverse_rms
from rewriting import check, refused, values


def extra_user(x: Tensor, weight: Tensor) -> Any:
    inverse = inverse_rms(x)
    return weight * (x * inverse), inverse


def keepdim_missing(x: Tensor, weight: Tensor) -> Tensor:
    # For (3, 3, 8) the mean of one row scales another row.
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS).unsqueeze(0).transpose(0, 2))


def exponent_three(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS))


def partly_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        inverse = inverse_rms(x)
    return weight * (x * inverse)


def partly_under_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        inverse = inverse_rms(x)
    return weight * (x * inverse)


def eps_of_a_tensor(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight.detach()[0].abs()))


NEAR_MISSES = {
    "extra-user": (extra_user, "used elsewhere"),
    "other-dimension": (
        lambda x, weight: weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS)),
        "mean has",
    ),
    "all-dimensions": (lambda x, weight: weight * (x * torch.rsqrt(x.pow(2).mean() + EPS)), ""),
    "keepdim-missing": (keepdim_missing, ""),
    "eps-outside": (
        lambda x, weight: weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + EPS)),
        "",
    ),
    "eps-in-the-mean": (
        lambda x, weight: weight * (x * torch.rsqrt((x.pow(2) + EPS).mean(-1, keepdim=True))),
        "",
    ),
    "exponent-three": (exponent_three, ""),
    "of-another-tensor": (lambda x, weight: weight * (x * inverse_rms(x + weight)), ""),
    "no_grad": (partly_without_gradient, "different gradient or autocast modes"),
    "autocast": (partly_under_autocast, "different gradient or autocast modes"),
    "eps-of-a-tensor": (eps_of_a_tensor, ""),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_of_rms_norm(function, reason):
    refused(function, values(3, 3, 8), values(8), op="rms_norm", reason=reason)


def writing(write: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x * 1.5
        inverse = inverse_rms(x)
        write(x)
        return weight * (x * inverse)

    return norm


def set_first(x: Tensor) -> None:
    x[0, 0] = 1.0


def augmented_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    inverse = inverse_rms(x)
    x += 1
    return weight * (x * inverse)


IN_PLACE = {
    "mul_": (writing(lambda x: x.mul_(2)), "written in place"),
    "setitem": (writing(set_first), "written in place"),
    "copy_": (writing(lambda x: x[:, 1].copy_(x[:, 0] * 2)), "written in place"),
    "out": (writing(lambda x: torch.add(x, 1.0, out=x)), "written in place"),
    # Another value of the graph.
    "iadd": (augmented_in_between, ""),
}


@pytest.mark.parametrize(("function", "reason"), IN_PLACE.values(), ids=IN_PLACE)
def test_writes_between_the_operations_of_rms_norm(function, reason):
    x, weight = values(3, 3, 8).detach(), values(8).detach()
    refused(function, x, weight, op="rms_norm", reason=reason)


@pytest.mark.parametrize("shape", [(3, 8), (1, 8), ()])
def test_rms_norm_in_float32_of_a_weight_that_is_no_row(shape):
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(*shape, dtype=torch.bfloat16)
    refused(gemma, x, weight, op="rms_norm", reason=f"the shape {shape}")


def rounded_square(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.pow(2).float().mean(-1, keepdim=True)
    return weight * (x.float() * torch.rsqrt(variance + EPS)).to(x.dtype)


ROUNDED_ELSEWHERE = {
    "before-the-product": lambda x, weight: weight * (x * inverse_rms(x.float()).to(x.dtype)),
    "square": rounded_square,
}


@pytest.mark.parametrize("function", ROUNDED_ELSEWHERE.values(), ids=ROUNDED_ELSEWHERE)
def test_rms_norm_that_rounds_elsewhere(function):
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)
    found = check(function, x, weight, counts={})
    assert found.reasons("rms_norm")


def test_torch_rms_norms_that_the_op_has_not():
    x = values(2, 3, 8)
    of_two = lambda x, w: F.rms_norm(x, (3, 8), w, EPS)
    refused(of_two, x, values(3, 8), op="rms_norm", reason="over 2 dimensions")
    refused(nn.RMSNorm(8), x, op="rms_norm", reason="eps=None")


def test_rms_norm_with_an_eps_that_the_op_refuses():
    function = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-9))
    assert check(function, values(2, 3, 8), values(8), counts={}).counts() == {}
    function = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + -1e-9))
    refused(function, values(2, 3, 8), values(8), op="rms_norm", reason="eps must be")
