"""gated_rms_norm under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from op_under_test import Case, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class GatedNormCase(Case):
    gate_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    eps: float = 1e-6
    norm_before_gate: bool = True
    num_groups: int = 1
    activation: str = "silu"
    casting_mode: str = "llama"

    @property
    def options(self) -> tuple[Any, ...]:
        """The op's options between weight and casting_mode."""
        group_size = None if self.num_groups == 1 else self.shape[-1] // self.num_groups
        return self.eps, self.norm_before_gate, group_size, self.activation


def tensors(case: GatedNormCase) -> Tensors:
    values = Values(case.seed)
    return {
        "x": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "gate": values.draw(case.shape, case.gate_dtype or case.dtype, case.layout, 2.0),
        "weight": values.draw(case.shape[-1:], case.weight_dtype),
        "dy": values.draw(case.shape, case.dtype, case.dy_layout),
    }


def magnitudes(case: GatedNormCase, tensors: Tensors) -> tuple[float, float, float, float]:
    """The magnitudes of y, dx, dgate, and of a factor of the terms of dweight."""
    x, gate = (tensors[name].double() for name in ("x", "gate"))
    if x.numel() == 0:
        return 0.0, 0.0, 0.0, 0.0
    a = torch.sigmoid(gate) * (gate if case.activation == "silu" else 1.0)
    s = x if case.norm_before_gate else x * a
    groups = s.reshape(*s.shape[:-1], case.num_groups, -1)
    rstd = float((groups.square().mean(-1) + case.eps).rsqrt().max())
    scale = max_abs(tensors["weight"], 1.0)
    most = float(a.abs().max())
    before = most if case.norm_before_gate else 1.0
    normalised = rstd * float(s.abs().max())
    gradient = rstd * max_abs(tensors["dy"]) * scale * (1 + normalised)
    # The slopes of both activations are at most 1.1.
    dgate = 1.1 * gradient * (1 + float(x.abs().max()))
    return normalised * scale * before, gradient * most, dgate, before * (1 + normalised)


def gradient_magnitudes(case: GatedNormCase, tensors: Tensors) -> list[float]:
    _, dx, dgate, factor = magnitudes(case, tensors)
    x, dy = tensors["x"], tensors["dy"]
    terms = float(dy.double().abs().sum() / x.shape[-1]) if x.numel() else 0.0
    return [dx, dgate, terms * factor]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> GatedNormCase:
    return GatedNormCase(shape=(rows, 2, 6), dtype=dtype, weight_dtype=dtype, **form)


def grouped(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> GatedNormCase:
    return sample(dtype, rows, **{"norm_before_gate": False, "num_groups": 2, **form})


def described(form: str, sample: Any) -> OpUnderTest:
    return OpUnderTest(
        name="gated_rms_norm",
        form=form,
        tensors=tensors,
        forward_args=lambda c, t: (t["x"], t["gate"], t["weight"], *c.options, c.casting_mode),
        backward_args=lambda c, t: (
            *(t[name] for name in ("dy", "x", "gate", "weight")),
            *c.options,
            list(c.output_mask),
        ),
        gradients_of=("x", "gate", "weight"),
        output_magnitudes=lambda c, t: [magnitudes(c, t)[0]],
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("x", "gate", "dy"),
        leading=("x",),
        autocast_as="silu",
    )


OPS = (described("", sample), described("grouped", grouped))
