"""rms_norm, found in the code of models in every spelling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norm_spellings import EPS, gemma, inverse_rms, llama, olmo2, unwidened
from rewriting import DTYPES, check, each_dtype, values


def t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    wide = x * torch.rsqrt(variance + EPS)
    if weight.dtype in (torch.float16, torch.bfloat16):
        wide = wide.to(weight.dtype)
    return weight * wide


def helium(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (weight.to(torch.float32) * (wide * inverse_rms(wide))).to(x.dtype)


def unweighted(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x.float())).type_as(x)


def unweighted_t5(x: Tensor, weight: Tensor) -> Tensor:
    return (x * inverse_rms(x.float())).to(x.dtype)


def mochi(x: Tensor, weight: Tensor) -> Tensor:
    return (x * inverse_rms(x.float()) * weight).to(x.dtype)


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
    "mochi": (mochi, "gemma", 0.0, True),
    "unwidened": (unwidened, "none", 0.0, True),
    "unweighted": (unweighted, "gemma", 0.0, False),
    "unweighted-t5": (unweighted_t5, "gemma", 0.0, False),
    "unweighted-unwidened": (lambda x, weight: x * inverse_rms(x), "none", 0.0, False),
    "F.rms_norm": (torch_function, "gemma", 0.0, True),
    "F.rms_norm-unweighted": (torch_unweighted, "gemma", 0.0, False),
}


@pytest.mark.quick(rewrites=("rms_norm",))
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float16], ids=[*DTYPES, "float16"])
@pytest.mark.parametrize(("function", "mode", "offset", "weighted"), MODES.values(), ids=MODES)
def test_rms_norm(function, mode, offset, weighted, dtype):
    found = check(
        function, values(2, 3, 8, dtype=dtype), values(8, dtype=dtype), counts={"rms_norm": 1}
    )
    (call,) = found.calls("rms_norm")
    assert (call["eps"], call["offset"]) == (EPS, offset)
    assert (call["weight"] is not None) == weighted
    # In float32 the casting modes are the same.
    assert dtype == torch.float32 or call["casting_mode"] == mode


@each_dtype
def test_rms_norm_module(dtype):
    norm = nn.RMSNorm(8, eps=EPS).to(dtype)
    (call,) = check(norm, values(2, 3, 8, dtype=dtype), counts={"rms_norm": 1}).calls("rms_norm")
    assert (call["eps"], call["casting_mode"]) == (EPS, "gemma")


def test_rms_norm_of_a_narrow_x_and_a_wide_weight():
    """Llama's product with a float32 weight is float32 and stays; its other factor is rounded."""
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8)
    (call,) = check(llama, x, weight, counts={"rms_norm": 1}).calls("rms_norm")
    assert call["weight"] is None and call["casting_mode"] == "gemma"
    for function in (gemma, helium, olmo2):
        (call,) = check(function, x, weight, counts={"rms_norm": 1}).calls("rms_norm")
        assert call["casting_mode"] == "gemma"


def left_wide(x: Tensor, weight: Tensor) -> Tensor:
    return weight.float() * (x.float() * inverse_rms(x.float()))


@pytest.mark.parametrize("weight_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("norm", [left_wide, lambda x, w: x * inverse_rms(x.float()) * w])
def test_rms_norm_whose_result_stays_float32(norm, weight_dtype):
    """As diffusers' RMSNorm with a float32 weight: the op is given x in float32."""
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8, dtype=weight_dtype)
    (call,) = check(norm, x, weight, counts={"rms_norm": 1}).calls("rms_norm")
    assert call["x"].meta["example_value"].dtype == torch.float32


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "functions": lambda x, w: torch.mul(
        w,
        torch.mul(
            x.float(), torch.rsqrt(torch.add(torch.mean(torch.pow(x.float(), 2), 2, True), EPS))
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
        function, *(values(2, 3, 8), values(8)), then=(values(4, 5, 8), values(8)),
        counts={"rms_norm": 1}, dynamic=True,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 4, 8)])
def test_rms_norm_of_any_rank(shape):
    check(llama, values(*shape), values(8), counts={"rms_norm": 1})


def test_rms_norm_of_heads_seen_transposed():
    """The rows of a projection, (B, S, heads, D), viewed as (B, heads, S, D)."""
    check(
        lambda x, w: llama(x.transpose(1, 2), w),
        *(values(2, 3, 4, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)),
        counts={"rms_norm": 1},
    )


def test_rms_norm_of_expanded_rows():
    function = lambda x, weight: llama(x.expand(4, 3, 8), weight)
    check(function, values(1, 3, 8), values(8), counts={"rms_norm": 1})


@each_dtype
@pytest.mark.parametrize("function", [llama, olmo2])
@pytest.mark.parametrize("shape", [(3, 8), (1, 8), ()])
def test_rms_norm_of_a_weight_that_is_no_row(function, shape, dtype):
    """The product with the weight does not change."""
    x, weight = values(2, 3, 8, dtype=dtype), values(*shape, dtype=dtype)
    found = check(function, x, weight, counts={"rms_norm": 1})
    assert found.calls("rms_norm")[0]["weight"] is None


def gemma_with_a_narrow_offset(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x.float()) * (1.0 + weight)).to(x.dtype)


def test_rms_norm_of_an_offset_weight_that_is_rounded():
    """After rounding, the sum is an ordinary weight."""
    x, weight = values(2, 3, 8, dtype=torch.bfloat16), values(8, dtype=torch.bfloat16)
    found = check(gemma_with_a_narrow_offset, x, weight, counts={"rms_norm": 1})
    assert found.calls("rms_norm")[0]["offset"] == 0.0


def weight_written_afterwards(x: Tensor, weight: Tensor) -> Tensor:
    """A write after the norm does not prevent the match."""
    weight = weight * 1.0
    y = llama(x, weight)
    weight.add_(1)
    return y + weight


def test_a_write_after_the_norm_is_none_in_between():
    x, weight = values(2, 3, 8).detach(), values(8).detach()
    check(weight_written_afterwards, x, weight, counts={"rms_norm": 1})


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
