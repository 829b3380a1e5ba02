"""Rotations of pairs: DeepSeek's, Flux's, those of diffusers, and those of Llama 4's images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rewriting import check, each_dtype, values
from rotations import HEADS, B, D, S, heads, rotate_half, used


def of_both(rotation: Callable[..., Tensor], by_heads: bool = True) -> Callable[..., Any]:
    """The rotation of both; by heads, they are viewed as (B, heads, S, D)."""

    def function(q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        if by_heads:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return used(rotation(q, *tables)), used(rotation(k, *tables))

    return function


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tables in which no number occurs twice."""
    return [values(*shape, dtype=dtype, seed=seed).detach() for seed in (2, 3)]


# DeepSeek


def in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def deepseek(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A number per pair, in the first half of the tables."""
    # A symbol is not known to be even.
    q, k = (x.reshape(*x.shape[:-1], D).transpose(1, 2) for x in (q, k))
    cos, sin = (table[..., : D // 2].unsqueeze(1) for table in (cos, sin))
    return used(in_halves(q, cos, sin)), used(in_halves(k, cos, sin))


def by_views(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs are brought into halves first; the tables have a number per element of these."""
    b, h, s, d = x.shape
    x = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def by_slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def by_stack(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-2).flatten(-2)


WAYS = {
    "pairs": deepseek,
    "views": of_both(by_views),
    "slices": of_both(by_slices),
    "stack": of_both(by_stack),
}


@each_dtype
@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_pairs_that_are_written_in_halves(function, dtype):
    found = check(function, *heads(dtype), *tables(B, S, D, dtype=dtype), counts={"rope": 1})
    (call,) = found.calls("rope")
    assert (call["interleaved"], call["deinterleave"]) == (True, True)
    assert call["per_pair"] is (function in (deepseek, WAYS["stack"]))


def test_pairs_that_are_written_in_halves_at_any_length():
    check(
        deepseek, *(*heads(), *tables(1, S, D)), then=(*heads(rows=3, length=7), *tables(1, 7, D)),
        counts={"rope": 1}, dynamic=True,
    )  # fmt: skip


# diffusers


def diffusers(x: Tensor, cos: Tensor, sin: Tensor, at: int = 1, halves: bool = False) -> Tensor:
    """Tables (S, D), and positions at dimension `at` of x."""
    index = (None, None) if at == 2 else (None, slice(None), None)
    cos, sin = cos[index].to(x.device), sin[index].to(x.device)
    if halves:
        real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
        turned = torch.cat([-imaginary, real], dim=-1)
    else:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


@each_dtype
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("halves", [False, True])
def test_tables_of_positions_alone(at, halves, dtype):
    """Flux and CogVideoX; Stable Audio and CogView4 have halves."""
    function = of_both(lambda x, *of: diffusers(x, *of, at, halves), by_heads=at == 2)
    found = check(function, *heads(dtype), *tables(S, D), counts={"rope": 1})
    (call,) = found.calls("rope")
    assert (call["interleaved"], call["per_pair"]) == (not halves, False)
    assert call["q"].meta["example_value"].dtype is dtype


def test_pairs_by_unflatten():
    def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    (call,) = check(of_both(rotation), *heads(), *tables(B, S, D), counts={"rope": 1}).calls("rope")
    assert call["interleaved"] is True


# Flux's own code


def flux(x: Tensor, matrices: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    y = matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]
    return y.reshape(*x.shape).type_as(x)


@each_dtype
@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("by_heads", [True, False])
def test_matrices(rows, by_heads, dtype):
    """Matrices of any numbers, with a dimension for the heads."""
    shape = (rows, 1, S, D // 2, 2, 2) if by_heads else (rows, S, 1, D // 2, 2, 2)
    matrices = tables(*shape)[0]
    found = check(of_both(flux, by_heads), *heads(dtype), matrices, counts={"rope": 1})
    (call,) = found.calls("rope")
    assert call["sin"] is None
    assert call["q"].meta["example_value"].dtype is dtype


def test_matrices_at_any_length():
    # All sizes differ, because equal sizes become one symbol.
    given = [
        (*heads(rows=n, length=s), tables(1, 1, s, D // 2, 2, 2)[0]) for n, s in ((5, 9), (4, 7))
    ]
    check(of_both(flux), *given[0], then=given[1], counts={"rope": 1}, dynamic=True)


# Llama 4's images


def complex_product(x: Tensor, frequencies: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * frequencies).flatten(3).type_as(x)


def llama4(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = frequencies.view(1, S, 1, D // 2)
    return complex_product(q, frequencies), complex_product(k, frequencies)


@each_dtype
def test_frequencies_of_an_image(dtype):
    frequencies = torch.complex(*tables(S, 1, D // 2))
    (call,) = check(llama4, *heads(dtype), frequencies, counts={"rope": 1}).calls("rope")
    assert call["sin"] is None
    assert call["q"].meta["example_value"].dtype is dtype


# Near misses


def other_half_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table[..., : D // 2].unsqueeze(1) for table in (cos, sin))
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([second * cos + first * sin, first * cos - second * sin], dim=-1)


def halves_into_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of DeepSeek's: halves are read, and pairs written."""
    cos, sin = (table[..., : D // 2].unsqueeze(1) for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def other_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, h, s, d = x.shape
    x = x.view(b, h, s, 2, d // 2).transpose(4, 3).reshape(b, h, s, d)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def turned_as_it_was(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The products are of pairs in halves and of pairs as they were."""
    b, h, s, d = x.shape
    halves = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return halves * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def first_elements_twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = torch.cat((x[..., ::2], x[..., ::2]), -1)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def quarters(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, c, d = x.reshape(*x.shape[:-1], 4, -1).unbind(-2)
    turned = torch.cat([-b, a, -d, c], dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


NO_ROPE = [
    other_half_first, halves_into_pairs, turned_as_it_was, quarters,
]  # fmt: skip


@pytest.mark.parametrize("rotation", NO_ROPE)
def test_near_misses(rotation):
    q, k, cos, sin = (one.detach() for one in (*heads(), *tables(B, S, D)))
    found = check(of_both(rotation), q, k, cos, sin, counts={})
    assert found.counts() == {}


@pytest.mark.parametrize(("rotation", "count"), [(first_elements_twice, 2), (other_view, 1)])
def test_elements_in_another_order(rotation, count):
    """The op rotates what the slices or views make, by halves."""
    found = check(of_both(rotation), *heads(), *tables(B, S, D), counts={"rope": count})
    assert not any(call["deinterleave"] for call in found.calls("rope"))


def test_matrices_of_each_head():
    given = heads()[0], tables(1, HEADS, S, D // 2, 2, 2)[0]
    found = check(lambda q, m: used(flux(q.transpose(1, 2), m)), *given, counts={})
    assert "not one for all heads" in found.reasons("rope")[0]


def test_frequencies_without_imaginary_parts():
    """As after model.to(torch.bfloat16): the model scales its pairs."""
    found = check(llama4, *heads(), tables(S, 1, D // 2)[0], counts={})
    assert "sin must be given with a real cos" in found.reasons("rope")[0]


def test_matrices_of_another_product():
    """By the transposed matrices."""

    def transposed(x: Tensor, matrices: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2, 1)
        y = matrices[..., 0, :] * pairs[..., 0, :] + matrices[..., 1, :] * pairs[..., 1, :]
        return y.reshape(*x.shape).type_as(x)

    matrices = tables(1, 1, S, D // 2, 2, 2)[0]
    assert check(of_both(transposed), *heads(), matrices, counts={}).counts() == {}
