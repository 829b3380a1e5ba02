"""rms_norm, fused_add_rms_norm, layer_norm and group_norm, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewriting import check, refused, values

EPS = 1e-5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + EPS)
    return weight * wide.to(x.dtype)


def t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    wide = x * torch.rsqrt(variance + EPS)
    if weight.dtype in (torch.float16, torch.bfloat16):
        wide = wide.to(weight.dtype)
    return weight * wide


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    output = x.float() * inverse_rms(x.float())
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def olmo2(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (weight * (wide * inverse_rms(wide))).to(x.dtype)


def helium(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (weight.to(torch.float32) * (wide * inverse_rms(wide))).to(x.dtype)


def unwidened(x: Tensor, weight: Tensor) -> Tensor:
    return x * inverse_rms(x) * weight


def unweighted(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x.float())).type_as(x)


def unweighted_unwidened(x: Tensor, weight: Tensor) -> Tensor:
    return x * inverse_rms(x)


def torch_function(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def torch_unweighted(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


MODES: dict[str, tuple[Callable[..., Tensor], str, float, bool]] = {
    "llama": (llama, "llama", 0.0, True),
    "t5": (t5, "llama", 0.0, True),
    "gemma": (gemma, "gemma", 1.0, True),
    "olmo2": (olmo2, "gemma", 0.0, True),
    "helium": (helium, "gemma", 0.0, True),
    "unwidened": (unwidened, "none", 0.0, True),
    "unweighted": (unweighted, "gemma", 0.0, False),
    "unweighted-unwidened": (unweighted_unwidened, "none", 0.0, False),
    "F.rms_norm": (torch_function, "gemma", 0.0, True),
    "F.rms_norm-unweighted": (torch_unweighted, "gemma", 0.0, False),
}


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float16], ids=[*DTYPES, "float16"])
@pytest.mark.parametrize(("function", "mode", "offset", "weighted"), MODES.values(), ids=MODES)
def test_rms_norm(function, mode, offset, weighted, dtype):
    found = check(
        function, values(2, 3, 8, dtype=dtype), values(8, dtype=dtype), counts={"rms_norm": 1}
    )
    (call,) = found.calls("rms_norm")
    assert (call["eps"], call["offset"]) == (EPS, offset)
    assert (call["weight"] is not None) == weighted
    # In float32 the modes are one.
    assert dtype == torch.float32 or call["casting_mode"] == mode


@each_dtype
def test_rms_norm_module(dtype):
    norm = nn.RMSNorm(8, eps=EPS).to(dtype)
    (call,) = check(norm, values(2, 3, 8, dtype=dtype), counts={"rms_norm": 1}).calls("rms_norm")
    assert (call["eps"], call["casting_mode"]) == (EPS, "gemma")


def test_rms_norm_of_a_narrow_x_and_a_wide_weight():
    """Llama's product with a float32 weight is float32, and stays; what it is of is rounded."""
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8)
    (call,) = check(llama, x, weight, counts={"rms_norm": 1}).calls("rms_norm")
    assert call["weight"] is None and call["casting_mode"] == "gemma"
    for function in (gemma, helium, olmo2):
        (call,) = check(function, x, weight, counts={"rms_norm": 1}).calls("rms_norm")
        assert call["casting_mode"] == "gemma"


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "functions": lambda x, w: torch.mul(
        w,
        torch.mul(
            x.float(),
            torch.rsqrt(torch.add(torch.mean(torch.pow(x.float(), 2), 2, True), EPS)),
        ).to(x.dtype),
    ),
    "methods": lambda x, w: (
        x.float()
        .mul(x.float().square().mean(dim=-1, keepdim=True).add(EPS).rsqrt())
        .type_as(x)
        .mul(w)
    ),
    "operators": lambda x, w: (
        (x.float() * (((x.float() ** 2).mean((-1,), keepdim=True) + EPS) ** -0.5)).to(x) * w
    ),
    "x-times-x": lambda x, w: (
        w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + EPS)).to(x.dtype)
    ),
    "square": lambda x, w: (
        w * (x.float() * torch.rsqrt(torch.square(x.float()).mean(2, True) + EPS)).to(x.dtype)
    ),
    "commuted": lambda x, w: (
        (torch.rsqrt(EPS + x.float().pow(2).mean(-1, keepdim=True)) * x.float()).to(x.dtype) * w
    ),
    "one-over-sqrt": lambda x, w: (
        w * (x.float() * (1 / torch.sqrt(x.float().pow(2).mean(-1, True) + EPS))).to(x.dtype)
    ),
    "divided-by-sqrt": lambda x, w: (
        w * (x.float() / torch.sqrt(x.float().pow(2).mean(-1, True) + EPS)).to(x.dtype)
    ),
    "reciprocal": lambda x, w: (
        w
        * (x.float() * torch.reciprocal((x.float().pow(2).mean(-1, True) + EPS).sqrt())).type(
            x.dtype
        )
    ),
    "casts-that-do-nothing": lambda x, w: llama(
        x.to(x.dtype).type_as(x), w.to(x.device).type(w.dtype)
    ).to(x.dtype),
    "dropout-of-nothing": lambda x, w: llama(F.dropout(x, p=0.0), F.dropout(w, 0.5, False)),
    "contiguous": lambda x, w: llama(x.contiguous(), w.contiguous()),
}


@each_dtype
@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS)
def test_rms_norm_spelled_otherwise(function, dtype):
    found = check(
        function, values(2, 3, 8, dtype=dtype), values(8, dtype=dtype), counts={"rms_norm": 1}
    )
    (call,) = found.calls("rms_norm")
    assert (call["eps"], call["offset"], call["casting_mode"]) == (EPS, 0.0, "llama")


@pytest.mark.parametrize("function", [llama, gemma, torch_function])
def test_rms_norm_of_any_number_of_rows(function):
    check(
        function,
        *(values(2, 3, 8), values(8)),
        then=(values(4, 5, 8), values(8)),
        counts={"rms_norm": 1},
        dynamic=True,
    )


def test_rms_norm_of_heads_seen_transposed():
    """The rows of a projection, (B, S, heads, D), seen as (B, heads, S, D)."""
    check(
        lambda x, w: llama(x.transpose(1, 2), w),
        *(values(2, 3, 4, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)),
        counts={"rms_norm": 1},
    )


def extra_user(x: Tensor, weight: Tensor) -> Any:
    inverse = inverse_rms(x)
    return weight * (x * inverse), inverse


def other_dimension(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS))


def all_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean() + EPS))


def keepdim_missing(x: Tensor, weight: Tensor) -> Tensor:
    # Of (3, 3, 8): the mean of one row scales another.
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS).unsqueeze(0).transpose(0, 2))


def eps_outside(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + EPS))


def eps_in_the_mean(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt((x.pow(2) + EPS).mean(-1, keepdim=True)))


def exponent_three(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS))


def of_another_tensor(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * inverse_rms(x + weight))


def written_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    inverse = inverse_rms(x)
    x.mul_(2)
    return weight * (x * inverse)


def set_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    inverse = inverse_rms(x)
    x[0, 0] = 1.0
    return weight * (x * inverse)


def copied_into_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    inverse = inverse_rms(x)
    x[:, 1].copy_(x[:, 0] * 2)
    return weight * (x * inverse)


def augmented_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x * 1.5
    inverse = inverse_rms(x)
    x += 1
    return weight * (x * inverse)


def out_in_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x.detach() * 1.5
    inverse = inverse_rms(x)
    torch.add(x, 1.0, out=x)
    return weight * (x * inverse)


def weight_written_afterwards(x: Tensor, weight: Tensor) -> Tensor:
    """A write after the norm does not keep it from being found."""
    weight = weight * 1.0
    y = llama(x, weight)
    weight.add_(1)
    return y + weight


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
    "other-dimension": (other_dimension, "mean has"),
    "all-dimensions": (all_dimensions, ""),
    "keepdim-missing": (keepdim_missing, ""),
    "eps-outside": (eps_outside, ""),
    "eps-in-the-mean": (eps_in_the_mean, ""),
    "exponent-three": (exponent_three, ""),
    "of-another-tensor": (of_another_tensor, ""),
    "no_grad": (partly_without_gradient, "different gradient or autocast modes"),
    "autocast": (partly_under_autocast, "different gradient or autocast modes"),
    "eps-of-a-tensor": (eps_of_a_tensor, ""),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_of_rms_norm(function, reason):
    refused(function, values(3, 3, 8), values(8), op="rms_norm", reason=reason)


IN_PLACE = {
    "mul_": (written_in_between, "written in place"),
    "setitem": (set_in_between, "written in place"),
    "copy_": (copied_into_in_between, "written in place"),
    "out": (out_in_between, "written in place"),
    # Another value of the graph.
    "iadd": (augmented_in_between, ""),
}


@pytest.mark.parametrize(("function", "reason"), IN_PLACE.values(), ids=IN_PLACE)
def test_writes_between_the_operations_of_rms_norm(function, reason):
    x, weight = values(3, 3, 8).detach(), values(8).detach()
    refused(function, x, weight, op="rms_norm", reason=reason)


@each_dtype
@pytest.mark.parametrize("function", [llama, olmo2])
@pytest.mark.parametrize("shape", [(3, 8), (1, 8), ()])
def test_rms_norm_of_a_weight_that_is_no_row(function, shape, dtype):
    """The product with it stays what it is."""
    x, weight = values(2, 3, 8, dtype=dtype), values(*shape, dtype=dtype)
    found = check(function, x, weight, counts={"rms_norm": 1})
    assert found.calls("rms_norm")[0]["weight"] is None


@pytest.mark.parametrize("shape", [(3, 8), (1, 8), ()])
def test_rms_norm_in_float32_of_a_weight_that_is_no_row(shape):
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(*shape, dtype=torch.bfloat16)
    refused(gemma, x, weight, op="rms_norm", reason=f"the shape {shape}")


def test_a_write_after_the_norm_is_none_in_between():
    x, weight = values(2, 3, 8).detach(), values(8).detach()
    check(weight_written_afterwards, x, weight, counts={"rms_norm": 1})


def rounded_before_the_product(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * inverse_rms(x.float()).to(x.dtype))


def rounded_square(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.pow(2).float().mean(-1, keepdim=True)
    return weight * (x.float() * torch.rsqrt(variance + EPS)).to(x.dtype)


def result_left_wide(x: Tensor, weight: Tensor) -> Tensor:
    return weight.float() * (x.float() * inverse_rms(x.float()))


def gemma_with_a_narrow_offset(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x.float()) * (1.0 + weight)).to(x.dtype)


ROUNDED_ELSEWHERE = {
    "before-the-product": rounded_before_the_product,
    "square": rounded_square,
    "not-at-all": result_left_wide,
}


@pytest.mark.parametrize("function", ROUNDED_ELSEWHERE.values(), ids=ROUNDED_ELSEWHERE)
def test_rms_norm_that_rounds_elsewhere(function):
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)
    found = check(function, x, weight, counts={})
    assert found.reasons("rms_norm")


def test_rms_norm_of_an_offset_weight_that_is_rounded():
    """Rounded, the sum is a weight like any other."""
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)
    found = check(gemma_with_a_narrow_offset, x, weight, counts={"rms_norm": 1})
    assert found.calls("rms_norm")[0]["offset"] == 0.0


def test_torch_rms_norms_that_the_op_has_not():
    x = values(2, 3, 8)
    of_two = lambda x, w: F.rms_norm(x, (3, 8), w, EPS)
    refused(of_two, x, values(3, 8), op="rms_norm", reason="over 2 dimensions")
    refused(nn.RMSNorm(8), x, op="rms_norm", reason="eps=None")


def written_afterwards(x: Tensor, weight: Tensor) -> Tensor:
    y = llama(x, weight)
    y[..., 0] = 0.0
    y += x
    return y


def of_its_own_result(x: Tensor, weight: Tensor) -> Tensor:
    return llama(llama(x, weight), weight)


@pytest.mark.parametrize(("function", "count"), [(written_afterwards, 1), (of_its_own_result, 2)])
def test_what_is_done_to_a_norm(function, count):
    check(function, values(2, 3, 8), values(8), counts={"rms_norm": count})


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 4, 8)])
def test_rms_norm_of_any_rank(shape):
    check(llama, values(*shape), values(8), counts={"rms_norm": 1})


def test_rms_norm_of_expanded_rows():
    function = lambda x, weight: llama(x.expand(4, 3, 8), weight)
    check(function, values(1, 3, 8), values(8), counts={"rms_norm": 1})


def test_rms_norm_with_an_eps_that_the_op_refuses():
    function = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-9))
    assert check(function, values(2, 3, 8), values(8), counts={}).counts() == {}
    function = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + -1e-9))
    refused(function, values(2, 3, 8), values(8), op="rms_norm", reason="eps must be")


@each_dtype
def test_rms_norm_under_autocast(dtype):
    """On a device the op would compute in float32, and this code in bfloat16 does not."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return unwidened(x, weight)

    x, weight = values(2, 3, 8, dtype=dtype), values(8, dtype=dtype)
    if dtype == torch.float32:
        check(function, x, weight, counts={"rms_norm": 1})
    else:
        refused(function, x, weight, op="rms_norm", reason="under autocast")


# The sum and its norm


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = residual + x
    return llama(total, weight), total


ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda a, b: a + b,
    "function": lambda a, b: torch.add(a, b),
    "method": lambda a, b: b.add(a),
    "alpha-of-one": lambda a, b: torch.add(a, b, alpha=1),
    "dropout-of-nothing": lambda a, b: F.dropout(a, 0.0) + b,
}


@each_dtype
@pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
def test_fused_add_rms_norm(add, dtype):
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = add(x, residual)
        return gemma(total, weight), total

    x, residual = values(2, 3, 8, dtype=dtype), values(2, 3, 8, dtype=dtype, seed=1)
    found = check(function, x, residual, values(8, dtype=dtype), counts={"fused_add_rms_norm": 1})
    (call,) = found.calls("fused_add_rms_norm")
    assert (call["eps"], call["offset"], call["casting_mode"]) == (EPS, 1.0, "gemma")
    assert found.calls("rms_norm") == []


def test_fused_add_rms_norm_of_a_sum_that_nothing_else_uses():
    function = lambda x, residual, weight: norm_of_sum(x, residual, weight)[0]
    check(
        function,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        counts={"fused_add_rms_norm": 1},
    )


def test_fused_add_rms_norms_along_a_residual_stream():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(llama(x, weight))
        return llama(x, weight)

    # The first norm is of an input.
    counts = {"rms_norm": 1, "fused_add_rms_norm": 3}
    check(function, values(2, 3, 8), values(8), counts=counts)


def test_fused_add_rms_norm_of_any_number_of_rows():
    check(
        norm_of_sum,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        then=(values(4, 5, 8), values(4, 5, 8, seed=1), values(8)),
        counts={"fused_add_rms_norm": 1},
        dynamic=True,
    )


def sum_scaled(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = torch.add(x, residual, alpha=2)
    return llama(total, weight), total


def sum_written(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    total.mul_(2)
    return llama(total, weight), total


def term_written(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    residual = residual * 1.5
    total = x + residual
    residual.mul_(2)
    return llama(total, weight), total, residual


def sum_without_gradient(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    with torch.no_grad():
        total = x + residual
    return llama(total, weight), total


def weight_of_the_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    weight = weight * torch.tanh(total).mean((0, 1))
    return llama(total, weight), total


NO_FUSED_ADD = {
    "alpha": (sum_scaled, ""),
    "sum-written": (sum_written, "written in place"),
    "term-written": (term_written, "written in place"),
    "no_grad": (sum_without_gradient, "different gradient or autocast modes"),
    "weight-of-the-sum": (weight_of_the_sum, "only after the sum is used"),
}


@pytest.mark.parametrize(("function", "reason"), NO_FUSED_ADD.values(), ids=NO_FUSED_ADD)
def test_near_misses_of_fused_add_rms_norm(function, reason):
    refused(
        function,
        *(values(2, 3, 8), values(2, 3, 8, seed=1), values(8)),
        op="fused_add_rms_norm",
        reason=reason,
        counts={"rms_norm": 1},
    )


@pytest.mark.parametrize("shape", [(8,), (1, 3, 8), (2, 3, 1)])
def test_fused_add_rms_norm_of_a_broadcast_residual(shape):
    refused(
        norm_of_sum,
        *(values(2, 3, 8), values(*shape), values(8)),
        op="fused_add_rms_norm",
        reason="broadcast",
        counts={"rms_norm": 1},
    )


def test_a_number_added_is_no_residual():
    refused(
        lambda x, weight: llama(x + 1.0, weight),
        *(values(2, 3, 8), values(8)),
        op="fused_add_rms_norm",
        counts={"rms_norm": 1},
    )


def test_fused_add_rms_norm_of_two_dtypes():
    """Their sum is float32, the op's as PyTorch's."""
    x, residual = values(2, 3, 8, dtype=torch.bfloat16), values(2, 3, 8)
    check(norm_of_sum, x, residual, values(8), counts={"fused_add_rms_norm": 1})


# Layer norm


def cohere(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + EPS)
    return (weight.to(torch.float32) * wide).to(x.dtype)


def layer_norm_of_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (8,), weight, eps=EPS)


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
    "weight": layer_norm_of_weight,
    "alone": layer_norm_alone,
    "weight-and-bias": layer_norm_of_both,
    "cohere": cohere,
    "cohere-otherwise": cohere_otherwise,
}


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
        function,
        *(values(2, 3, 8), values(8)),
        then=(values(4, 5, 8), values(8)),
        counts={"layer_norm": 1},
        dynamic=True,
    )


def layer_norm_over_two(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (3, 8), eps=EPS) * weight


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
    # Of N - 1, as MPT's predecessors and Annotated Transformer have it.
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS)


def cohere_without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * ((x - mean) * torch.rsqrt(variance + EPS))


NO_LAYER_NORM = {
    "two-dimensions": (layer_norm_over_two, "over 2 dimensions"),
    "no_grad": (cohere_without_gradient, "different gradient or autocast modes"),
    "extra-user": (centred_also_used, "used elsewhere"),
    "other-dimension": (centred_by_another_dimension, "mean has -2"),
    "standard-deviation": (standard_deviation, ""),
}


@pytest.mark.parametrize(("function", "reason"), NO_LAYER_NORM.values(), ids=NO_LAYER_NORM)
def test_near_misses_of_layer_norm(function, reason):
    """What follows the subtraction of the mean may still be an rms_norm."""
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


# Group norm


def group_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, weight * 2, EPS)


GROUP_NORMS = {
    "weight-and-bias": group_norm,
    "weight": lambda x, weight: F.group_norm(x, 4, weight=weight, eps=EPS),
    "alone": lambda x, weight: torch.group_norm(x, num_groups=4, eps=EPS),
}


@each_dtype
@pytest.mark.parametrize("function", GROUP_NORMS.values(), ids=GROUP_NORMS)
@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 3)])
def test_group_norm(function, shape, dtype):
    x, weight = values(*shape, dtype=dtype), values(8, dtype=dtype)
    (call,) = check(function, x, weight, counts={"group_norm": 1}).calls("group_norm")
    assert (call["num_groups"], call["eps"]) == (4, EPS)


def test_group_norm_module():
    norm = nn.GroupNorm(2, 8, eps=1e-3)
    (call,) = check(norm, values(2, 8, 5), counts={"group_norm": 1}).calls("group_norm")
    assert (call["num_groups"], call["eps"]) == (2, 1e-3)


def test_group_norm_of_any_size():
    check(
        group_norm,
        *(values(2, 8, 5), values(8)),
        then=(values(3, 8, 7), values(8)),
        counts={"group_norm": 1},
        dynamic=True,
    )


def test_near_misses_of_group_norm():
    x = values(2, 8, 3, 3).detach().contiguous(memory_format=torch.channels_last)
    refused(group_norm, x.requires_grad_(), values(8), op="group_norm", reason="strides")
    by_hand = lambda x, weight: F.layer_norm(x.view(2, 4, 2, 5), (2, 5)).view(2, 8, 5)
    refused(by_hand, values(2, 8, 5), values(8), op="group_norm")
    instance = lambda x, weight: F.instance_norm(x, weight=weight)
    refused(instance, values(2, 8, 5), values(8), op="group_norm")
    batch = lambda x, weight: F.batch_norm(x, None, None, weight, training=True)
    refused(batch, values(2, 8, 5), values(8), op="group_norm")
