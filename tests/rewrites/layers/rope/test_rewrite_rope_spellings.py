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


def by_fours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two pairs of neighbours at a time."""
    x1, x2, x3, x4 = x.reshape(*x.shape[:-1], -1, 4).unbind(dim=-1)
    turned = torch.stack((-x2, x1, -x4, x3), dim=-1).flatten(start_dim=-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


# The rotation, how many columns its tables have, and the op's arguments.
SPELLINGS: dict[str, tuple[Rotation, int, bool, bool]] = {
    "cohere-partly": (cohere_partly, D // 2, True, False),
    "cohere-whole": (cohere_partly, D, True, False),
    "by-view": (by_view, D, True, False),
    "stacked": (stacked, D // 2, True, True),
    "by-matrices": (by_matrices, D // 2, True, True),
    "last-positions": (last_positions, D, False, False),
    "neighbours-by-fours": (by_fours, D, True, False),
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


def test_rope_by_any_matrices():
    """The op's, too, need not be those of angles."""

    def other_matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        matrices = torch.stack((cos, -sin, cos, sin), dim=-1)[..., : D // 2, :]
        pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
        return (pairs * matrices.view(*cos.shape[:-1], -1, 2, 2).unsqueeze(1)).sum(5).flatten(3)

    for call in check(
        applied(other_matrices), *heads(), *tables(B, S, D), counts={"rope": 2}
    ).calls("rope"):
        assert call["sin"] is None


def test_rope_by_matrices_of_heads_before_the_last_dimension():
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table.narrow(-1, 0, D // 2) for table in (cos, sin))
        return by_matrices(q, cos, sin, heads=2), by_matrices(k, cos, sin, heads=2)

    check(function, *heads(), *tables(B, S, D), counts={"rope": 1})


# Code outside of transformers: heads are (B, S, heads, D), and tables are given as they come


def llama2_c(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
    cos, sin = (table.view(1, x.shape[1], 1, -1) for table in (cos, sin))
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3).type_as(x)


def torchtune(x: Tensor, cache: Tensor, unused: Tensor) -> Tensor:
    """One table has cos and sin."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cache = cache.view(-1, x.size(1), 1, pairs.size(3), 2)
    cos, sin = cache[..., 0], cache.select(-1, 1)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3).type_as(x)


def litgpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


def with_the_sign_at_sin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """nanochat's."""
    a, b = x[..., : x.shape[3] // 2], x[..., x.shape[3] // 2 :]
    return torch.cat([a * cos + b * sin, a * (-sin) + b * cos], 3).to(x.dtype)


def modded_nanogpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[None, : x.size(-3), None, :], sin[None, : x.size(-3), None, :]
    return with_the_sign_at_sin(x.float(), cos, sin).type_as(x)


def tables_in_its_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return modded_nanogpt(x, cos.to(x.dtype), sin.to(x.dtype))


def gpt_neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, passed), dim=-1)


def in_three_pieces(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, passed = x.split([D // 4, D // 4, D // 2], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, passed), dim=-1)


def positions_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Megatron's: (S, B, heads, D)."""
    x = x.transpose(0, 1)
    return x * cos + rotate_half(x) * sin


def x_transformers(turned: Rotation, scaled: bool) -> Rotation:
    def rotation(x: Tensor, angles: Tensor, scale: Any) -> Tensor:
        angles, scale = angles[:, None], scale[:, None] if scaled else 1.0
        x, size = x.transpose(1, 2), angles.shape[-1]
        rotated, passed = x[..., :size], x[..., size:]
        rotated = (rotated * angles.cos() * scale) + (turned(rotated) * angles.sin() * scale)
        return torch.cat((rotated, passed), dim=-1).type(x.dtype)

    return rotation


def turned_by_view(x: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    return torch.stack((-b, a), dim=-1).reshape(x.shape)


def strided(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def expanded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return strided(x, *(table.expand(-1, -1, x.shape[2], -1) for table in (cos, sin)))


H = D // 2
# The rotation, the shape of both tables, whether they are float32, and the op's arguments.
AS_WRITTEN: dict[str, tuple[Rotation, tuple[int, ...], bool, bool, bool]] = {
    "llama2.c": (llama2_c, (S, H), True, True, True),
    "torchtune": (torchtune, (S, H, 2), True, True, True),
    "litgpt": (litgpt, (S, D), False, False, False),
    "litgpt-4d": (litgpt, (1, 1, S, D), False, False, False),
    "nanochat": (with_the_sign_at_sin, (1, S, 1, H), False, False, True),
    "modded-nanogpt": (modded_nanogpt, (S, H), True, False, True),
    "modded-nanogpt-in-its-dtype": (tables_in_its_dtype, (S, H), True, False, True),
    "gpt-neox": (gpt_neox, (1, S, 1, H), False, False, False),
    "three-pieces": (in_three_pieces, (1, S, 1, H // 2), False, False, True),
    "positions-first": (positions_first, (S, 1, 1, D), False, False, False),
    "x-transformers": (x_transformers(turned_by_view, False), (1, S, H), True, True, False),
    "x-transformers-xpos": (x_transformers(rotate_half, True), (1, S, H), True, False, False),
    "strided": (strided, (1, S, 1, H), False, True, True),
    "expanded": (expanded, (1, S, 1, H), False, True, True),
}


def of_both(rotation: Rotation) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = rotation(q, cos, sin), rotation(k, cos, sin)
        return used(rotated[0]), used(rotated[1])

    return function


@each_dtype
@pytest.mark.parametrize(
    ("rotation", "shape", "is_wide", "interleaved", "per_pair"), AS_WRITTEN.values(), ids=AS_WRITTEN
)
def test_rope_as_it_is_written(rotation, shape, is_wide, interleaved, per_pair, dtype):
    given = tables(*shape, dtype=torch.float32 if is_wide else dtype)
    found = check(of_both(rotation), *heads(dtype), *given, counts={"rope": 1})
    (call,) = found.calls("rope")
    assert (call["interleaved"], call["per_pair"]) == (interleaved, per_pair)


@each_dtype
def test_rope_of_polar_numbers(dtype):
    """Llama's own code."""

    def rotated(x: Tensor, table: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * table).flatten(3).type_as(x)

    def function(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.polar(torch.ones_like(angles), angles).view(1, q.shape[1], 1, -1)
        return rotated(q, table), rotated(k, table)

    given = *heads(dtype), tables(S, H)[0]
    assert check(function, *given, counts={"rope": 1}).calls("rope")[0]["sin"] is None


@pytest.mark.parametrize("rotation", [llama2_c, torchtune, with_the_sign_at_sin])
def test_rope_as_it_is_written_of_any_length(rotation):
    def given(rows: int, s: int) -> list[Tensor]:
        more = {llama2_c: (s, H), torchtune: (s, H, 2), with_the_sign_at_sin: (1, s, 1, H)}
        return [*heads(rows=rows, length=s), *tables(*more[rotation])]

    def function(q: Tensor, k: Tensor, *of: Tensor) -> tuple[Tensor, Tensor]:
        # A symbol is not known to be even.
        q, k = (x.reshape(*x.shape[:-1], D) for x in (q, k))
        return of_both(rotation)(q, k, *of)  # type: ignore[no-any-return]

    check(function, *given(9, S), then=given(4, 7), counts={"rope": 1}, dynamic=True)


def test_tables_with_gradients_as_they_come():
    """The op's gradients of learned tables have the sign and the shape of the code's."""
    given = values(1, S, 1, H, seed=2), values(1, S, 1, H, seed=3)
    check(of_both(with_the_sign_at_sin), *heads(), *given, counts={"rope": 1})


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


def halves_by_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.reshape(*x.shape[:-1], 2, -1).unbind(dim=-2)
    turned = torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def regrouped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The view also joins other dimensions."""
    x1, x2 = x.reshape(B, -1, S * D // 2, 2).unbind(dim=-1)
    turned = torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2).view(x.shape)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def truncated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.int32).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rounded_to_8_bits(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.float8_e4m3fn).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rounded_to_bfloat16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x).to(torch.bfloat16).to(x.dtype)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def pairs_of(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return (a, b, *(table[..., : D // 2].unsqueeze(1) for table in (cos, sin)))


def reflected(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, cos, sin = pairs_of(x, cos, sin)
    return torch.cat((a * cos + b * sin, a * sin - b * cos), dim=-1)


def sheared(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, cos, sin = pairs_of(x, cos, sin)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1)


def by_two_cosines(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, cos, sin = pairs_of(x, cos, sin)
    return torch.cat((a * cos - b * sin, b * sin.cos() + a * sin), dim=-1)


def by_one_column(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same angle for all pairs: a table of one column has one pair for the op."""
    a, b, cos, sin = pairs_of(x, cos, sin)
    cos, sin = cos[..., :1], sin[..., :1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def written_as_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, cos, sin = pairs_of(x, cos, sin)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def of_each_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(1) * x[..., :1].detach().exp() for table in (cos, sin))
    return x * cos + rotate_half(x) * sin


# Code that is left, and the reason.
LEFT = {
    reflected: "signs",
    sheared: "signs",
    by_two_cosines: "different tables",
    by_one_column: "has 1 columns, not 8",
    written_as_pairs: "reads pairs in halves and writes them interleaved",
    of_each_head: "not one for all heads",
    rounded_to_bfloat16: "rounded to a narrower dtype",
}


@pytest.mark.parametrize("rotation", LEFT)
def test_what_is_left_has_a_reason(rotation):
    q, k, cos, sin = (one.detach() for one in (*heads(), *tables(B, S, D)))
    reasons = check(applied(rotation), q, k, cos, sin, counts={}).reasons("rope")
    assert len(reasons) == 2 and all(LEFT[rotation] in reason for reason in reasons)


def by_positions_and_by_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many heads as positions, and half of each pair by the tables of the heads."""
    x, cos, sin = x[:, :3, :3], cos[:, :3, : D // 2], sin[:, :3, : D // 2]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    first = a * cos.unsqueeze(1) - b * sin.unsqueeze(1)
    return torch.cat((first, b * cos.unsqueeze(2) + a * sin.unsqueeze(2)), dim=-1)


NO_ROPE = [
    by_positions_and_by_heads, halves_by_view, regrouped, truncated, rounded_to_8_bits,
]  # fmt: skip


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
    found = check(applied(rounded), *given, counts={"rope": 1})
    for call in found.calls("rope"):
        assert call["q"].all_input_nodes
