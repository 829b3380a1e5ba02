"""rope under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class RopeCase(Case):
    """A drawn use of rope. shape is q's, dy and ds the gradients of the two results."""

    k_heads: int = 1
    # The shape of cos and sin before (S, R): none, one, or a table for each of the batch.
    tables: str = "none"
    rotary: int = 2
    table_dtype: torch.dtype = torch.float32
    k_layout: str = "contiguous"
    table_layout: str = "contiguous"
    interleaved: bool = False


def tensors(case: RopeCase) -> Tensors:
    values = Values(case.seed)
    B, _, S, D = case.shape
    k_shape = (B, case.k_heads, S, D)
    table_shape = {"none": (), "one": (1,), "batch": (B,)}[case.tables] + (S, case.rotary)
    return {
        "q": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "k": values.draw(k_shape, case.dtype, case.k_layout, case.scale),
        "cos": values.draw(table_shape, case.table_dtype, case.table_layout, case.scale),
        "sin": values.draw(table_shape, case.table_dtype, "contiguous", case.scale),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout, case.scale),
        "ds": values.draw(k_shape, case.dtype, case.k_layout, case.scale),
    }


def magnitudes(names: tuple[str, str], tensors: Tensors) -> list[float]:
    turn = max_abs(tensors["cos"]) + max_abs(tensors["sin"])
    return [max_abs(tensors[name]) * turn for name in names]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> RopeCase:
    """`rows` batches of a partial rotation, with tables for each; k laid out as in a model."""
    return RopeCase(
        shape=(rows, 2, 4, 6),
        dtype=dtype,
        k_heads=1,
        tables="batch",
        rotary=4,
        table_dtype=dtype,
        k_layout="model",
        **form,
    )


OPS = (
    OpUnderTest(
        name="rope",
        tensors=tensors,
        forward_args=lambda c, t: (t["q"], t["k"], t["cos"], t["sin"], c.interleaved),
        backward_args=lambda c, t: (
            t["dy"],
            t["ds"],
            t["cos"],
            t["sin"],
            c.interleaved,
            list(c.output_mask[:2]),
        ),
        gradients_of=("q", "k"),
        gradients_from=("dy", "ds"),
        output_magnitudes=lambda c, t: magnitudes(("q", "k"), t),
        gradient_magnitudes=lambda c, t: magnitudes(("dy", "ds"), t),
        sample=sample,
        per_row=("q", "k", "dy", "ds"),
        leading=(),
        autocast_as="mul.Tensor",
    ),
)
