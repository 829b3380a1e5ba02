"""linear_divergence under test, in the form of linear_divergence_forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from liger_ops import library
from linear_cross_entropy_cases import NOT_COMPUTED, HeadCase, lora_of, tensors_of
from op_under_test import OpUnderTest, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class TwoHeadsCase(HeadCase):
    """A drawn use of linear_divergence. mask says which tensors of the student's head, and upstream
    which results have a gradient."""

    # The teacher's: hidden size, classes, and whether it is given by its logits.
    E: int = 5
    W: int = 11
    by_logits: bool = False
    # The rank of its LoRA, or None.
    teacher_rank: int | None = None
    # None for the student's.
    teacher_dtype: torch.dtype | None = None
    teacher_bias: bool = True
    has_target: bool = True
    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    teacher_temperature: float | None = None
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    chunk_bytes: int | None = 200
    upstream: tuple[bool, ...] = (True, True, True)
    return_entropy: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        return (
            self.kind, self.beta, self.temperature, self.teacher_temperature,
            self.softcap, self.teacher_softcap, self.logit_scale, self.teacher_logit_scale,
            self.soft_weight, self.hard_weight, -100, self.reduction,
            self.dtype if self.accumulate_narrow else None, self.chunk_bytes,
        )  # fmt: skip


INPUTS = (
    "student_x", "student_weight", "teacher_x", "teacher_weight", "student_bias", "teacher_bias",
    "teacher_logits", "target", "token_weight", "num_items_in_batch",
)  # fmt: skip
LORA = ("student_lora_x", "student_lora_b")
TEACHER_LORA = ("teacher_lora_x", "teacher_lora_b")
HEAD = ("student_x", "student_weight", "student_bias", *LORA)
UPSTREAM = ("dloss", "ddivergence", "dcross_entropy")


def tensors(case: TwoHeadsCase) -> Tensors:
    x, weight, target, bias, _, token_weight, items = tensors_of(case)
    values = Values(case.seed + 1)
    dtype = case.teacher_dtype or case.dtype
    hidden = None if case.by_logits else dtype
    given: Tensors = {
        "student_x": x,
        "student_weight": weight,
        "teacher_x": values.draw((*case.shape, case.E), hidden, "contiguous", case.scale),
        "teacher_weight": values.draw((case.W, case.E), hidden),
        "student_bias": bias,
        "teacher_bias": values.draw((case.W,), hidden if case.teacher_bias else None),
        "teacher_logits": values.draw(
            (*case.shape, case.W), dtype if case.by_logits else None, "contiguous", case.scale
        ),
        "target": target if case.has_target else None,
        "token_weight": token_weight,
        "num_items_in_batch": items,
        **dict(zip(LORA, lora_of(case), strict=True)),
    }
    wide = None if case.by_logits or case.teacher_rank is None else dtype
    rank = case.teacher_rank or 1
    given["teacher_lora_x"] = values.draw((*case.shape, rank), wide, "contiguous", case.scale)
    given["teacher_lora_b"] = values.draw((case.W, rank), wide)
    for name in ("teacher_x", "teacher_logits", "teacher_lora_x"):
        if case.shape and given[name] is not None:
            given[name] = laid_out(given[name], case.layout)
    forward = library.OPS["linear_divergence_forward"].definition
    lora = {name: given[name] for name in (*LORA, *TEACHER_LORA)}
    outputs = forward(*(given[name] for name in INPUTS), *case.options, **lora)
    given["statistics"] = outputs[3]
    for name, wanted, output in zip(UPSTREAM, case.upstream, outputs, strict=False):
        given[name] = None
        if wanted and output is not None:
            given[name] = values.draw(tuple(output.shape), output.dtype)
            if output.dim():
                given[name] = laid_out(given[name], case.dy_layout)
    return given


def forward_args(case: TwoHeadsCase, tensors: Tensors) -> tuple[Any, ...]:
    mask = [wanted and case.reduction != "none" for wanted in case.mask]
    lora = (tensors[name] for name in (*LORA, *TEACHER_LORA))
    return (*(tensors[name] for name in INPUTS), *case.options, case.return_entropy, mask, *lora)


def backward_args(case: TwoHeadsCase, tensors: Tensors) -> tuple[Any, ...]:
    values = (tensors[name] for name in (*UPSTREAM, *INPUTS, "statistics"))
    lora = (tensors[name] for name in (*LORA, *TEACHER_LORA))
    return (*values, *NOT_COMPUTED, *case.options, list(case.mask), *lora, None, None)


def sample(
    form: dict[str, Any], dtype: torch.dtype = torch.float64, rows: int = 3, **more: Any
) -> TwoHeadsCase:
    """Every option in use, in several chunks. All sizes differ, because tracing would treat equal
    ones as one size."""
    options = {
        "temperature": 0.8, "teacher_temperature": 1.3, "softcap": 3.0, "teacher_softcap": 4.0,
        "logit_scale": 0.7, "teacher_logit_scale": 1.2, "soft_weight": 0.6, "hard_weight": 0.4,
    }  # fmt: skip
    chunk_bytes = 4 * 7 * dtype.itemsize
    return TwoHeadsCase(
        shape=(rows, 2), D=4, V=7, E=6, dtype=dtype, chunk_bytes=chunk_bytes,
        token_weight=True, rank=5, return_entropy=True, **options, **form, **more,
    )  # fmt: skip


HIDDEN = {"W": 9, "teacher_rank": 8, "reduction": "mean", "beta": 0.3, "num_items": True}
LOGITS = {"W": 8, "reduction": "none", "kind": "reverse_kl", "by_logits": True}


def described(name: str, form: dict[str, Any], needed: int) -> OpUnderTest:
    # tests/ops/test_linear_divergence.py checks its kernels with bounds of their own.
    return OpUnderTest(
        name="linear_divergence_forward",
        form=name,
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=HEAD,
        needed=needed,
        gradients_from=UPSTREAM,
        no_gradient=(*INPUTS[2:4], *INPUTS[5:], *TEACHER_LORA),
        output_magnitudes=lambda case, tensors: [],
        gradient_magnitudes=lambda case, tensors: [],
        sample=partial(sample, form),
        per_row=(),
        leading=("student_x",),
        multiplies=True,
        autocast_as="linear",
    )


OPS = (described("mean", HIDDEN, 4), described("none", LOGITS, 8))
