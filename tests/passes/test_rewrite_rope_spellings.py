"""Rarer spellings of rotary position embedding, and code that is nearly one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rewriting import check, each_dtype, values
from rotations import B, D, Rotation, S, applied, heads, rotate_half, rotate_neighbours, used

SECTIONS = [1, 4, 3]


def cohere_partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GLM4V's: pairs of neighbours, in a part of the head, by tables of a number per element."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (rotate_neighbours(rotated) * sin), passed], dim=-1)


def by_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inkling's: the neighbours are a dimension of their own."""
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    turned = torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def stacked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The privacy filter's: GPT-OSS's code with pairs of neighbours."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def by_matrices(x: Tensor, cos: Tensor, sin: Tensor, heads: int = 1) -> Tensor:
    """PE-Audio's: the pairs are multiplied by rotation matrices."""
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).view(*cos.shape, 2, 2)
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (pairs * matrices.unsqueeze(heads)).sum(5).flatten(3)


def last_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables of more positions than x may have; here they have as many."""
    cos, sin = (table.unsqueeze(1)[..., -x.size(-2) :, :] for table in (cos, sin))
    return x * cos + rotate_half(x) * sin


# The rotation, how many columns its tables have, and the op's arguments.
SPELLINGS: dict[str, tuple[Rotation, int, bool, bool]] = {
    "cohere-partly": (cohere_partly, D // 2, True, False),
    "cohere-whole": (cohere_partly, D, True, False),
    "by-view": (by_view, D, True, False),
    "stacked": (stacked, D // 2, True, True),
    "by-matrices": (by_matrices, D // 2, True, True),
    "last-positions": (last_positions, D, False, False),
}


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tables in which no number occurs twice."""
    return [values(*shape, dtype=dtype, seed=seed).detach() for seed in (2, 3)]


@each_dtype
@pytest.mark.parametrize(
    ("rotation", "columns", "interleaved", "per_pair"), SPELLINGS.values(), ids=SPELLINGS
)
def test_rope(rotation, columns, interleaved, per_pair, dtype):
    given = *heads(dtype), *tables(B, S, columns, dtype=dtype)
    found = check(applied(rotation), *given, counts={"rope": 1})
    (call,) = found.calls("rope")
    assert (call["interleaved"], call["per_pair"]) == (interleaved, per_pair)
    assert call["sections"] is None


def test_rope_of_any_length():
    check(
        applied(cohere_partly),
        *(*heads(), *tables(1, S, D // 2)),
        then=(*heads(rows=3, length=7), *tables(1, 7, D // 2)),
        counts={"rope": 1},
        dynamic=True,
    )


def test_rope_by_matrices_of_heads_before_the_last_dimension():
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table.narrow(-1, 0, D // 2) for table in (cos, sin))
        return by_matrices(q, cos, sin, heads=2), by_matrices(k, cos, sin, heads=2)

    check(function, *heads(), *tables(B, S, D), counts={"rope": 1})


# Sections of three tables


def combined(table: Tensor, sections: list[int]) -> Tensor:
    """Qwen2-VL's code, which takes the columns of one table from three by turns."""
    pieces = table.split(sections * 2, dim=-1)
    return torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)


def in_sections(combine: Callable[[Tensor, list[int]], Tensor]) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (combine(table, SECTIONS).unsqueeze(1) for table in (cos, sin))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        rotated = (x * cos + rotate_half(x) * sin for x in (q, k))
        return tuple(map(used, rotated))  # type: ignore[return-value]

    return function


@each_dtype
@pytest.mark.parametrize("rows", [1, B])
def test_rope_in_sections(rows, dtype):
    """The tables are not combined in memory."""
    given = *heads(dtype), *tables(3, rows, S, D, dtype=dtype)
    found = check(in_sections(combined), *given, counts={"rope": 1})
    (call,) = found.calls("rope")
    assert call["sections"] == SECTIONS
    assert call["cos"].op == "placeholder"
    assert not [node for node in found.nodes() if node.target is torch.cat]


def other_turns(table: Tensor, sections: list[int]) -> Tensor:
    pieces = table.split(sections * 2, dim=-1)
    return torch.cat([piece[(i + 1) % 3] for i, piece in enumerate(pieces)], dim=-1)


def other_columns(table: Tensor, sections: list[int]) -> Tensor:
    pieces = table.flip(-1).split(sections * 2, dim=-1)[::-1]
    return torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)


def other_halves(table: Tensor, sections: list[int]) -> Tensor:
    pieces = table.split([*sections, *sections[::-1]], dim=-1)
    return torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)


def overlapping(table: Tensor, sections: list[int]) -> Tensor:
    pieces = table.split(sections * 2, dim=-1)
    return torch.cat([pieces[i % 3][i % 3] for i in range(6)], dim=-1)


def of_two_tables(table: Tensor, sections: list[int]) -> Tensor:
    pieces = table.split(sections * 2, dim=-1)
    others = (table + 1).split(sections * 2, dim=-1)
    return torch.cat([(others if i == 2 else pieces)[i][i % 3] for i in range(6)], dim=-1)


@pytest.mark.parametrize(
    "combine", [other_turns, other_columns, other_halves, overlapping, of_two_tables]
)
def test_other_combined_tables_are_one_table(combine):
    found = check(in_sections(combine), *heads(), *tables(3, B, S, D), counts={"rope": 1})
    assert found.calls("rope")[0]["sections"] is None


# Near misses


def other_matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    matrices = torch.stack((cos, -sin, cos, sin), dim=-1)[..., : D // 2, :]
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (pairs * matrices.view(*cos.shape[:-1], -1, 2, 2).unsqueeze(1)).sum(5).flatten(3)


def halves_by_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.reshape(*x.shape[:-1], 2, -1).unbind(dim=-2)
    turned = torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def triples_by_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2, x3, x4 = x.reshape(*x.shape[:-1], -1, 4).unbind(dim=-1)
    turned = torch.stack((-x2, x1, -x4, x3), dim=-1).flatten(start_dim=-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def regrouped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The view also joins other dimensions."""
    x1, x2 = x.reshape(B, -1, S * D // 2, 2).unbind(dim=-1)
    turned = torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2).view(x.shape)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def stacked_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-2).flatten(-2)


def truncated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.int32).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rounded_to_8_bits(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.float8_e4m3fn).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rounded_to_bfloat16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.bfloat16).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


NO_ROPE = [
    other_matrices,
    halves_by_view,
    triples_by_view,
    regrouped,
    stacked_first,
    truncated,
    rounded_to_8_bits,
    rounded_to_bfloat16,
]


@pytest.mark.parametrize("rotation", NO_ROPE)
def test_near_misses(rotation):
    q, k, cos, sin = (one.detach() for one in (*heads(), *tables(B, S, D)))
    found = check(applied(rotation), q, k, cos, sin, counts={})
    assert found.counts() == {}


def test_arguments_that_were_rounded_to_8_bits():
    """The op gets x as rounded: a cast to 8 bits is never overlooked."""

    def rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.to(torch.float8_e4m3fn).to(torch.float32)
        return (x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)).to(torch.bfloat16)

    given = [one.detach() for one in (*heads(torch.bfloat16), *tables(B, S, D))]
    found = check(applied(rounded), *given, counts={"rope": 2})
    for call in found.calls("rope"):
        assert call["q"].meta["example_value"].dtype is torch.float32
