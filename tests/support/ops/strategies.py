"""Strategies of Hypothesis for the cases of an op: shapes, strides and options, and a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from op_under_test import CHOICES, Case, OpUnderTest


@st.composite
def cases(draw: st.DrawFn, op: OpUnderTest, **choices: Sequence[Any]) -> Any:
    """Draw a case of an op. `choices` replaces the values of some fields."""

    def pick(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    fields = {name: pick(v) for name, v in {**CHOICES, **op.choices, **choices}.items()}
    fields["output_mask"] = tuple(
        draw(st.booleans()) for _ in op.case(**fields, shape=()).output_mask
    )
    fields["seed"] = draw(st.integers(0, 2**31))
    return op.case(**fields | op.coupled(pick, fields))


def has_rows(case: Case) -> bool:
    """Return whether the first dimension has several rows."""
    return len(case.shape) > 1 and case.shape[0] > 1


def for_cases(
    op: OpUnderTest, check: Callable[[Any], None], fewer: int = 1, **options: Any
) -> None:
    """Call `check` with each drawn case. `fewer` divides the usual number of cases."""
    drawn = options.pop("drawn", None) or cases(op, **options)
    most = max(1, settings().max_examples // (fewer * op.cost))
    settings(max_examples=most)(given(drawn)(check))()
