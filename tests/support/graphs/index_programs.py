"""Random programs that compute a (queries, keys) mask from indices, and values of the algebra's
functions of indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.rewrites.engine.maps.algebra import (
    Affine,
    And,
    NonNegative,
    Not,
    Quotient,
    affine,
    conjunction,
    disjunction,
    negation,
)

# A program takes the numbers of queries and keys; its tensor broadcasts to (queries, keys).
Program = Callable[[int, int], Tensor]

COMPARISONS = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]


def value_at(value: Any, place: Sequence[int]) -> Any:
    """Evaluate a function of indices at `place`, the indices of all dimensions."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Affine):
        quotients = sum(slope * value_at(term, place) for term, slope in value.terms.items())
        slopes = sum(slope * place[axis] for axis, slope in value.slopes.items())
        return value.constant + slopes + quotients
    if isinstance(value, Quotient):
        return value_at(value.dividend, place) // value.divisor
    if isinstance(value, NonNegative):
        return value_at(value.value, place) >= 0
    if isinstance(value, Not):
        return not value_at(value.operand, place)
    if isinstance(value, And):
        return value_at(value.left, place) and value_at(value.right, place)
    return value_at(value.yes if value_at(value.condition, place) else value.no, place)


def _first(q: int, k: int) -> Tensor:
    return torch.arange(q)[:, None]


def _second(q: int, k: int) -> Tensor:
    return torch.arange(k).unsqueeze(0)


def _of(function: Callable[..., Tensor], *programs: Program) -> Program:
    return lambda q, k: function(*(program(q, k) for program in programs))


SMALL = st.integers(-3, 3)


def _numbers(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    """Return a strategy of integer tensors computed from integer tensors."""
    return st.one_of(
        st.builds(lambda x, n: _of(lambda a: a + n, x), inner, SMALL),
        st.builds(lambda x, n: _of(lambda a: a * n, x), inner, st.integers(-2, 2)),
        st.builds(lambda x, y: _of(operator.add, x, y), inner, inner),
        st.builds(lambda x, y: _of(torch.sub, x, y), inner, inner),
        st.builds(lambda x: _of(torch.abs, x), inner),
        st.builds(lambda x: _of(torch.neg, x), inner),
        st.builds(lambda x, n: _of(lambda a: a // n, x), inner, st.integers(1, 9)),
        st.builds(lambda x, n: _full(lambda a: a.diff(dim=0, prepend=a[:1] - n), x), inner, SMALL),
    )


NUMBERS = st.recursive(st.sampled_from([_first, _second, _first, _second]), _numbers, max_leaves=3)


def _truths(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    """Return a strategy of boolean tensors computed from boolean tensors."""
    return st.one_of(
        st.builds(lambda x, y: _of(operator.and_, x, y), inner, inner),
        st.builds(lambda x, y: _of(torch.logical_or, x, y), inner, inner),
        st.builds(lambda x, y: _of(operator.xor, x, y), inner, inner),
        st.builds(lambda x: _of(operator.invert, x), inner),
        st.builds(lambda x, y, z: _of(torch.where, x, y, z), inner, inner, inner),
        st.builds(lambda x, y: _of(lambda a, b: a.long() + b.long() > 0, x, y), inner, inner),
        st.builds(lambda x, n: _full(lambda a: a.tril(n), x), inner, SMALL),
        st.builds(lambda x, n: _full(lambda a: torch.triu(a, n), x), inner, SMALL),
        st.builds(lambda x: lambda q, k: x(k, q).expand(k, q).transpose(0, 1), inner),
        st.builds(lambda x: lambda q, k: x(q + 2, k + 1).expand(q + 2, k + 1)[:q, :k], inner),
        st.builds(lambda x: _full(lambda a: a[None].permute(2, 0, 1).squeeze().mT, x), inner),
        st.builds(lambda x: lambda q, k: x(q, 2 * k).expand(q, 2 * k).chunk(2, -1)[1], inner),
        st.builds(lambda x: lambda q, k: x(q, k).expand(q, k)[_first(q, k), _second(q, k)], inner),
        st.builds(lambda x: _full(lambda a: a.long().cumsum(-1) > 0, x), inner),
        st.builds(
            lambda x: _of(lambda a: torch.zeros(()).masked_fill(a, float("-inf")) == 0, x), inner
        ),
        st.builds(
            lambda x: _of(lambda a: ~torch.zeros(()).masked_fill(~a, float("-inf")).bool(), x),
            inner,
        ),
    )


def _full(function: Callable[[Tensor], Tensor], program: Program) -> Program:
    return lambda q, k: function(program(q, k).expand(q, k))


COMPARED = st.builds(
    lambda compare, x, y: _of(compare, x, y), st.sampled_from(COMPARISONS), NUMBERS, NUMBERS
)
# Numbers as booleans: negative numbers are True, too.
TRUTHS = NUMBERS.map(lambda x: _of(Tensor.bool, x))
# This strategy makes causal masks frequent enough among the drawn programs.
PLAIN = st.builds(
    lambda n, place: lambda q, k: (_second(q, k) + n) <= (_first(q, k) + n + place),
    SMALL,
    st.sampled_from([0, 0, 0, 0, -1, 1]),
)
TRUE = st.builds(
    lambda n: lambda q, k: _second(q, k) + q + k + n >= _first(q, k) - q, st.integers(0, 3)
)


def masks() -> st.SearchStrategy[Program]:
    """Return a strategy of programs whose boolean mask is (queries, keys), sometimes causal."""
    atoms = st.one_of(PLAIN, PLAIN, TRUE, COMPARED, TRUTHS)
    near = st.builds(lambda x, y: _of(operator.and_, x, y), PLAIN, st.one_of(TRUE, atoms))
    return st.one_of(PLAIN, near, st.recursive(atoms, _truths, max_leaves=4)).map(
        lambda program: lambda q, k: program(q, k).expand(q, k)
    )


def conditions() -> st.SearchStrategy[Any]:
    """Return a strategy of conditions on a query's and a key's index, as programs produce them."""
    slopes = st.fixed_dictionaries({-2: st.integers(-2, 2), -1: st.integers(-2, 2)})
    any_atom = st.builds(lambda n, slope: NonNegative(affine(n, slope)), st.integers(-6, 6), slopes)
    near = st.builds(lambda n: NonNegative(affine(n, {-2: 1, -1: -1})), st.integers(-1, 1))
    atoms = st.one_of(near, near, any_atom, st.booleans())
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(conjunction, inner, inner),
            st.builds(disjunction, inner, inner),
            st.builds(negation, inner),
        ),
        max_leaves=4,
    )
