"""embedding under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import DEVICE, Case, OpUnderTest, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class EmbeddingCase(Case):
    """shape is that of dy: of the indices, and the columns of the table."""

    words: int = 5
    index_dtype: torch.dtype = torch.int64
    padding_idx: int | None = None


def tensors(case: EmbeddingCase) -> Tensors:
    values = Values(case.seed)
    indices = torch.randint(case.words, case.shape[:-1], generator=values.generator)
    indices = indices.to(DEVICE, case.index_dtype)
    if indices.dim() and case.layout != "contiguous":
        indices = laid_out(indices, "strided")
    table = (case.words, case.shape[-1])
    return {
        "weight": values.draw(table, case.dtype, case.layout, case.scale),
        "indices": indices,
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def gradient_magnitudes(case: EmbeddingCase, tensors: Tensors) -> list[float]:
    """The largest sum of a word's values, without their signs."""
    dy = tensors["dy"].double().abs().reshape(-1, case.shape[-1])
    if dy.numel() == 0:
        return [0.0]
    sums = dy.new_zeros(case.words, case.shape[-1])
    return [float(sums.index_add_(0, tensors["indices"].reshape(-1).long(), dy).max())]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> EmbeddingCase:
    return EmbeddingCase(shape=(rows, 4, 6), dtype=dtype, **form)


OPS = (
    OpUnderTest(
        name="embedding",
        tensors=tensors,
        forward_args=lambda c, t: (t["weight"], t["indices"], c.padding_idx),
        backward_args=lambda c, t: (t["dy"], t["indices"], c.words, c.padding_idx),
        gradients_of=("weight",),
        no_gradient=("indices",),
        output_magnitudes=lambda c, t: [0.0],
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("indices", "dy"),
        leading=("weight", "indices"),
        is_pytorchs_forward=True,
        autocast_as="embedding",
    ),
)
