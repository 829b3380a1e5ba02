"""rope under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_under_test import Case, OpUnderTest, Tensors, Values, laid_out, max_abs


@dataclass(frozen=True, kw_only=True)
class RopeCase(Case):
    """A drawn use of rope. shape is q's; dy and ds are the gradients of the two results."""

    k_heads: int = 1
    # Dimensions of cos and sin before (S, R): "none", one of size 1, or the batch.
    tables: str = "none"
    rotary: int = 2
    table_dtype: torch.dtype = torch.float32
    k_layout: str = "contiguous"
    table_layout: str = "contiguous"
    interleaved: bool = False
    per_pair: bool = False
    # Whether one tensor holds cos + i sin.
    is_complex: bool = False
    # Pairs of each section: cos and sin then have three tables each; with None, one.
    sections: tuple[int, int, int] | None = None
    # Whether cos holds a 2 x 2 matrix for each pair, and sin is None.
    of_matrices: bool = False
    # Whether interleaved pairs are written in halves.
    deinterleave: bool = False


def tensors(case: RopeCase) -> Tensors:
    values = Values(case.seed)
    B, _, S, D = case.shape
    k_shape = (B, case.k_heads, S, D)
    leading = {"none": (), "one": (1,), "batch": (B,)}[case.tables]
    if case.sections is not None:
        leading = (3, *(leading or (1,)))
    halved = case.per_pair or case.is_complex or case.of_matrices
    table_shape = (*leading, S, case.rotary // 2 if halved else case.rotary)
    if case.of_matrices:
        table_shape = (*table_shape, 2, 2)
    return {
        "q": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "k": values.draw(k_shape, case.dtype, case.k_layout, case.scale),
        "cos": values.draw(table_shape, case.table_dtype, case.table_layout, case.scale),
        "sin": values.draw(table_shape, case.table_dtype, "contiguous", case.scale),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout, case.scale),
        "ds": values.draw(k_shape, case.dtype, case.k_layout, case.scale),
    }


def tables(case: RopeCase, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    cos, sin = tensors["cos"], tensors["sin"]
    if case.is_complex:
        return laid_out(torch.complex(cos, sin), case.table_layout), None
    return cos, None if case.of_matrices else sin


def options(case: RopeCase) -> tuple[Any, ...]:
    sections = case.sections and list(case.sections)
    return (case.interleaved, case.per_pair, sections, case.deinterleave)


def magnitudes(names: tuple[str, str], tensors: Tensors) -> list[float]:
    turn = max_abs(tensors["cos"]) + max_abs(tensors["sin"])
    return [max_abs(tensors[name]) * turn for name in names]


def rope(form: str, needed: int, is_complex: bool = False, **fields: Any) -> OpUnderTest:
    def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **drawn: Any) -> RopeCase:
        """Batches of a partial rotation, with tables for each; k laid out as in a model."""
        # Dynamo treats equal sizes as one, so the batch differs from all other sizes, including
        # that of three tables.
        batch = rows + 2 if fields.get("sections") else rows
        return RopeCase(
            shape=(batch, 2, 2, 8),
            dtype=dtype,
            k_heads=1,
            tables="batch",
            rotary=4,
            # There is no complex dtype for bfloat16.
            table_dtype=torch.promote_types(dtype, torch.float32) if is_complex else dtype,
            k_layout="model",
            is_complex=is_complex,
            **fields,
            **drawn,
        )

    return OpUnderTest(
        name="rope",
        form=form,
        tensors=tensors,
        forward_args=lambda c, t: (t["q"], t["k"], *tables(c, t), *options(c)),
        backward_args=lambda c, t: (
            t["dy"],
            t["ds"],
            *tables(c, t),
            *options(c),
            list(c.output_mask[:2]),
        ),
        needed=needed,
        gradients_of=("q", "k"),
        gradients_from=("dy", "ds"),
        output_magnitudes=lambda c, t: magnitudes(("q", "k"), t),
        gradient_magnitudes=lambda c, t: magnitudes(("dy", "ds"), t),
        sample=sample,
        per_row=("q", "k", "dy", "ds"),
        leading=(),
        autocast_as="mul.Tensor",
    )


OPS = (
    rope("", 4),
    rope("per-pair", 6, per_pair=True),
    rope("complex", 3, is_complex=True),
    rope("sections", 7, sections=(1, 1, 0)),
    rope("sections-per-pair", 7, sections=(1, 0, 1), interleaved=True, per_pair=True),
    rope("matrices", 3, of_matrices=True),
    rope("deinterleave", 8, interleaved=True, deinterleave=True),
)
