"""Rotary position embedding, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rewriting import check, each_dtype, values
from rotations import (
    KV_HEADS,
    B,
    D,
    Rotation,
    applied,
    cohere,
    heads,
    llama,
    phi3,
    rotate_half,
    rotate_neighbours,
    tables,
    used,
)


def rotate_neighbours_by_reshape(x: Tensor) -> Tensor:
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=3)


def llama_by_chunk(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.add(torch.mul(torch.cat([-x2, x1], -1), sin), torch.mul(cos, x))


def nanochat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos.unsqueeze(1) + torch.cat((x2, -x1), dim=-1) * sin.unsqueeze(1)


def llama_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return ((x.float() * cos.float()) + (rotate_half(x.float()) * sin.float())).to(x.dtype)


def glm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (rotate_neighbours(rotated) * sin), passed], dim=-1)


def gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos = torch.repeat_interleave(cos[:, None, :, :], 2, 3)
    sin = torch.repeat_interleave(sin[:, None, :, :], 2, 3)
    return (x * cos) + (rotate_neighbours(x) * sin)


def gptj_partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = 2 * cos.shape[-1]
    rotated, passed = x[..., :size], x[..., size:]
    return torch.cat([gptj(rotated, cos, sin), passed], dim=-1)


def gpt_oss(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def turned_the_other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., ::2], x[..., 1::2]
    turned = torch.stack((x2, -x1), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def subtracted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) - rotate_half(x) * sin.unsqueeze(1)


# The rotation, how many columns its tables have, and the op's arguments.
SPELLINGS: dict[str, tuple[Rotation, int, bool, bool]] = {
    "llama": (llama, D, False, False),
    "llama-by-chunk": (llama_by_chunk, D, False, False),
    "llama-in-float32": (llama_in_float32, D, False, False),
    "nanochat": (nanochat, D, False, False),
    "cohere": (cohere, D, True, False),
    "phi3": (phi3, D // 2, False, False),
    "phi3-whole": (phi3, D, False, False),
    "glm": (glm, D // 2, True, True),
    "glm-whole": (glm, D, True, True),
    "gptj": (gptj, D // 2, True, True),
    "gptj-partly": (gptj_partly, D // 4, True, True),
    "gpt-oss": (gpt_oss, D // 2, False, True),
    "other-sign": (turned_the_other_way, D, True, False),
    "subtracted": (subtracted, D, False, False),
}


@pytest.mark.quick(rewrites=("rope",))
@each_dtype
@pytest.mark.parametrize(
    ("rotation", "columns", "interleaved", "per_pair"), SPELLINGS.values(), ids=SPELLINGS
)
def test_rope(rotation, columns, interleaved, per_pair, dtype):
    found = check(applied(rotation), *heads(dtype), *tables(columns, dtype), counts={"rope": 1})
    (call,) = found.calls("rope")
    assert (call["interleaved"], call["per_pair"]) == (interleaved, per_pair)
    assert call["sections"] is None


def test_rope_in_float16():
    found = check(
        applied(llama), *heads(torch.float16), *tables(D, torch.float16), counts={"rope": 1}
    )
    assert len(found.calls("rope")) == 1


@pytest.mark.parametrize("rotation", [llama_in_float32])
def test_rope_with_tables_of_float32(rotation):
    check(applied(rotation), *heads(torch.bfloat16), *tables(D), counts={"rope": 1})


def test_rope_with_tables_for_each_sequence():
    check(applied(llama), *heads(), *tables(D, rows=B), counts={"rope": 1})


@pytest.mark.parametrize(
    "casts",
    [
        lambda rotation: lambda x, cos, sin: rotation(x, cos.to(x.dtype), sin.to(x.dtype)),
        lambda rotation: lambda x, cos, sin: rotation(x.float(), cos, sin).type_as(x),
        lambda rotation: lambda x, cos, sin: F.dropout(rotation(x, cos, sin), 0.0).to(x.dtype),
    ],
    ids=["tables-cast", "x-cast", "result-cast"],
)
@pytest.mark.parametrize("rotation", [llama, cohere, phi3, gpt_oss])
def test_rope_under_casts(rotation, casts):
    """The op computes in float32 and rounds once, wherever the code rounds."""
    columns = D // 2 if rotation is gpt_oss else D
    found = check(
        applied(casts(rotation)), *heads(torch.bfloat16), *tables(columns), counts={"rope": 1}
    )
    assert found.calls("rope")[0]["q"].meta["example_value"].dtype == torch.bfloat16


@each_dtype
@pytest.mark.parametrize("dim", [2, -2])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rope_of_heads_before_the_last_dimension(dtype, dim, neighbours):
    """The layout of T5Gemma, ESM and Gemma3n: (B, S, heads, D), never transposed."""
    turned = rotate_neighbours_by_reshape if neighbours else rotate_half

    def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos.unsqueeze(dim) + turned(x) * sin.unsqueeze(dim)

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotation(q, cos, sin), rotation(k, cos, sin)

    check(function, *heads(dtype), *tables(D, dtype), counts={"rope": 1})


@each_dtype
def test_rope_of_complex_tables(dtype):
    """Llama 4's."""

    def rotated(x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, :, None, :]).flatten(3).type_as(x)

    def function(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, table), rotated(k, table)

    table = torch.complex(*tables(D // 2))
    (call,) = check(function, *heads(dtype), table, counts={"rope": 1}).calls("rope")
    assert call["sin"] is None


def test_rope_of_two_layers():
    """Each layer's queries and keys are one op; all have the same tables."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        for _ in range(2):
            q, k = torch.tanh(llama(q, cos, sin)), torch.tanh(llama(k, cos, sin))
        return q.sum() + k.sum()

    check(function, *heads(), *tables(D), counts={"rope": 2})


ANY_LENGTH = {
    name: (rotation, columns)
    for name, (rotation, columns, _, _) in SPELLINGS.items()
    # A symbol is not known to be even, and for odd sizes chunk's halves differ.
    if rotation is not llama_by_chunk
}


@pytest.mark.parametrize(("rotation", "columns"), ANY_LENGTH.values(), ids=ANY_LENGTH)
def test_rope_of_any_length(rotation, columns):
    check(
        applied(rotation),
        *(*heads(), *tables(columns)),
        then=(*heads(rows=3, length=7), *tables(columns, length=7)),
        counts={"rope": 1},
        dynamic=True,
    )


def test_rope_whose_caller_passes_the_dimension_of_heads():
    """As in a rotary function that Dynamo compiles by itself, whose integers are symbols."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Any:
        q, k, cos, sin = (
            q.transpose(1, 2), k.transpose(1, 2), cos.unsqueeze(dim), sin.unsqueeze(dim),
        )  # fmt: skip
        return used(q * cos + rotate_half(q) * sin), used(k * cos + rotate_half(k) * sin)

    check(function, *heads(), *tables(D), 1, counts={"rope": 1}, dynamic=True)


# Near misses


def unevenly_halved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., :2], x[..., 2:]
    return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)


def unchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + torch.cat((-x, x), dim=-1)[..., :D] * sin.unsqueeze(1)


def of_another(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(torch.tanh(x)) * sin.unsqueeze(1)


def by_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(1)


def by_a_third_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * (sin * 2).unsqueeze(1) * cos.unsqueeze(1)


NO_ROPE: dict[str, Rotation] = {
    "unevenly-halved": unevenly_halved, "not-turned": unchanged, "of-another": of_another,
    "third-table": by_a_third_table,
}  # fmt: skip


@pytest.mark.parametrize("rotation", NO_ROPE.values(), ids=NO_ROPE)
def test_near_misses_of_rope(rotation):
    found = check(applied(rotation), *heads(), *tables(D), counts={})
    assert found.counts() == {}


def of_two_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return llama(q, cos, sin), llama(k, torch.tanh(cos), sin)


def half_also_used(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    turned = rotate_half(q)
    rotated = q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return rotated, llama(k, cos, sin), turned


def table_written_in_between(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, cos = q.transpose(1, 2), k.transpose(1, 2), cos * 1.0
    rotated = llama(q, cos, sin)
    cos.mul_(0.5)
    return rotated, llama(k, cos, sin)


def keys_written_in_between(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2) * 1.0
    rotated = llama(q, cos, sin)
    k += 1
    k[:, 0] = 0.0
    k.add_(q[:, :KV_HEADS])
    return rotated, llama(k, cos, sin)


def half_written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2) * 1.0, k.transpose(1, 2)
    turned = rotate_half(q) * sin.unsqueeze(1)
    q.mul_(2)
    return q * cos.unsqueeze(1) + turned, llama(k, cos, sin)


def keys_without_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotated = llama(q, cos, sin)
    with torch.no_grad():
        return rotated, llama(k, cos, sin)


def keys_of_rotated_queries(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotated = llama(q, cos, sin)
    return rotated, llama(k + rotated[:, :KV_HEADS], cos, sin)


def partly_under_autocast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotated = llama(q, cos, sin)
    with torch.autocast("cpu", torch.bfloat16):
        return rotated, llama(k, cos, sin)


# Number of ops: both tensors separately, or only one of them.
NO_PAIRS: dict[str, tuple[Callable[..., Any], int]] = {
    "two-tables": (of_two_tables, 2),
    "one-alone": (lambda q, k, cos, sin: (llama(q.transpose(1, 2), cos, sin), k * 2), 1),
    "extra-user": (half_also_used, 1),
    "no_grad": (keys_without_gradient, 2),
    "autocast": (partly_under_autocast, 2),
    "keys-of-queries": (keys_of_rotated_queries, 2),
}


@pytest.mark.parametrize(("function", "count"), NO_PAIRS.values(), ids=NO_PAIRS)
def test_rotations_that_are_no_pair(function, count):
    """Each tensor becomes an op of its own, with keys of no heads."""
    found = check(function, *heads(), *tables(D), counts={"rope": count})
    for call in found.calls("rope"):
        assert call["k"].meta["example_value"].shape[1] == 0
    if function is half_also_used:
        assert "used elsewhere" in found.reasons("rope")[0]


def cast_table_written_in_between(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, cos = q.transpose(1, 2), k.transpose(1, 2), cos * 1.0
    rotated = llama(q, cos.double(), sin.double()).to(q.dtype)
    cos.mul_(0.5)
    return rotated, llama(k, cos.double(), sin.double()).to(k.dtype)


WRITTEN: dict[str, tuple[Callable[..., Any], int]] = {
    "cast-table": (cast_table_written_in_between, 2),
    "table": (table_written_in_between, 2),
    "keys": (keys_written_in_between, 2),
    "half": (half_written, 1),
}


@pytest.mark.parametrize(("function", "count"), WRITTEN.values(), ids=WRITTEN)
def test_writes_between_two_rotations(function, count):
    inputs = [one.detach() for one in (*heads(), *tables(D))]
    found = check(function, *inputs, counts={"rope": count})
    if function is half_written:
        assert "written in place" in found.reasons("rope")[0]


def test_a_table_written_after_its_negative_was_taken():
    """The op would negate what was written."""

    def function(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, sin = q.transpose(1, 2), sin.unsqueeze(1) * 1.0
        back = -sin
        sin.mul_(0.5)
        return q * cos.unsqueeze(1) + rotate_half(q) * back

    found = check(function, *(one.detach() for one in (heads()[0], *tables(D))), counts={})
    assert found.reasons("rope") == ["a table is written in place before the rotation"]


@pytest.mark.parametrize("rotation", [phi3, gpt_oss])
def test_a_result_whose_strides_are_needed(rotation):
    """The op's strides are those of x; the strides of torch.cat are not."""
    columns = D // 2
    function = lambda x, cos, sin: rotation(x.transpose(1, 2), cos, sin)
    returned = check(function, heads()[0], *tables(columns), counts={})
    viewed = lambda x, cos, sin: function(x, cos, sin).view(B, -1) * 2
    for found in (returned, check(viewed, heads()[0], *tables(columns), counts={})):
        assert "strides" in found.reasons("rope")[0]


def test_rope_that_is_wider_than_its_heads():
    """bfloat16 x times a float32 table is float32, as under autocast; the op gets float32."""
    found = check(applied(llama), *heads(torch.bfloat16), *tables(D), counts={"rope": 1})
    assert found.calls("rope")[0]["q"].meta["example_value"].dtype == torch.float32


def test_rope_under_autocast():
    def projected(q: Tensor, k: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return applied(llama)(F.linear(q, weight), F.linear(k, weight), cos, sin)

    found = check(projected, *heads(), values(D, D), *tables(D), counts={"rope": 1})
    assert found.calls("rope")[0]["q"].meta["example_value"].dtype == torch.float32


def test_rope_of_tables_with_gradients():
    """Learned tables have gradients, with the op too."""
    cos, sin = (table.requires_grad_() for table in tables(D))
    check(applied(llama), *heads(), cos, sin, counts={"rope": 1})
