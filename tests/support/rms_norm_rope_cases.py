"""rms_norm_rope under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import rope_cases
from op_under_test import OpUnderTest, Tensors, Values, max_abs
from rope_cases import RopeCase


@dataclass(frozen=True, kw_only=True)
class RMSNormRopeCase(RopeCase):
    """A drawn use of rms_norm_rope: rope's, and the weights of the norms."""

    q_weight_dtype: torch.dtype | None = None
    k_weight_dtype: torch.dtype | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"
    output_mask: tuple[bool, ...] = (True, True, True, True)


def tensors(case: RMSNormRopeCase) -> Tensors:
    values = Values(case.seed + 1)
    return {
        **rope_cases.tensors(case),
        "q_weight": values.draw(case.shape[-1:], case.q_weight_dtype),
        "k_weight": values.draw(case.shape[-1:], case.k_weight_dtype),
    }


# q or k, its weight, and the gradient of its result.
TRIPLES = (("q", "q_weight", "dy"), ("k", "k_weight", "ds"))


def magnitudes(case: RMSNormRopeCase, tensors: Tensors) -> list[tuple[float, float, float]]:
    """The magnitudes of the result, of dx and of dweight, for q and for k."""
    turn = max(1.0, max_abs(tensors["cos"]) + max_abs(tensors["sin"]))
    found = []
    for name, weight, gradient in TRIPLES:
        x, dy = (tensors[given].double() for given in (name, gradient))
        if x.numel() == 0:
            found.append((0.0, 0.0, 0.0))
            continue
        rstd = float((x.square().mean(-1) + case.eps).rsqrt().max())
        scale = max_abs(tensors[weight], 1.0) + abs(case.offset)
        normalised = rstd * max_abs(x)
        of_dy = turn * max_abs(dy)
        terms = turn * float(dy.abs().sum() / x.shape[-1])
        found.append(
            (
                normalised * scale * turn,
                rstd * scale * of_dy * (1 + normalised),
                terms * (1 + normalised),
            )
        )
    return found


def gradient_magnitudes(case: RMSNormRopeCase, tensors: Tensors) -> list[float]:
    (_, dq, dq_weight), (_, dk, dk_weight) = magnitudes(case, tensors)
    return [dq, dk, dq_weight, dk_weight]


def backward_args(case: RMSNormRopeCase, t: Tensors) -> tuple[Any, ...]:
    return (
        *(t[name] for name in ("dy", "ds", "q", "k")),
        *rope_cases.tables(case, t),
        t["q_weight"],
        t["k_weight"],
        case.eps,
        case.offset,
        *rope_cases.options(case),
        list(case.output_mask),
    )


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **drawn: Any) -> RMSNormRopeCase:
    """Batches of a partial rotation, with tables for each; k laid out as in a model."""
    return RMSNormRopeCase(
        shape=(rows, 2, 2, 8),
        dtype=dtype,
        k_heads=1,
        tables="batch",
        rotary=4,
        table_dtype=dtype,
        k_layout="model",
        q_weight_dtype=dtype,
        k_weight_dtype=dtype,
        **drawn,
    )


OPS = (
    OpUnderTest(
        name="rms_norm_rope",
        tensors=tensors,
        forward_args=lambda c, t: (
            t["q"],
            t["k"],
            *rope_cases.tables(c, t),
            t["q_weight"],
            t["k_weight"],
            c.eps,
            c.offset,
            c.casting_mode,
            *rope_cases.options(c),
        ),
        backward_args=backward_args,
        needed=4,
        gradients_of=("q", "k", "q_weight", "k_weight"),
        gradients_from=("dy", "ds"),
        output_magnitudes=lambda c, t: [result for result, _, _ in magnitudes(c, t)],
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("q", "k", "dy", "ds"),
        leading=(),
        autocast_as="rms_norm",
    ),
)
