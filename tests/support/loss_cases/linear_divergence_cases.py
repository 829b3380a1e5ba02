"""linear_divergence under test, in the form of linear_divergence_forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from divergence_cases import PLAIN
from launch_forms import Fields, head_forms
from linear_cross_entropy_cases import SIZES, HeadCase, head, lora_of, tensors_of
from linear_log_prob_cases import COMPILED
from op_under_test import OpUnderTest, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class TwoHeadsCase(HeadCase):
    """A drawn call of linear_divergence. mask says which tensors of the student's head have a
    gradient, and upstream which results have one."""

    # The teacher's hidden size and classes, and whether the op is given its logits.
    E: int = 5
    W: int = 11
    by_logits: bool = False
    # The rank of the teacher's LoRA, or None.
    teacher_rank: int | None = None
    # None for the student's dtype.
    teacher_dtype: torch.dtype | None = None
    teacher_bias: bool = True
    has_target: bool = True
    kind: str = "jsd"
    beta: float = 0.5
    teacher_temperature: float | None = None
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    chunk_bytes: int | None = 200
    upstream: tuple[bool, ...] = (True, True, True)
    return_entropy: bool = False


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
    drawn: Tensors = {
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
    drawn["teacher_lora_x"] = values.draw((*case.shape, rank), wide, "contiguous", case.scale)
    drawn["teacher_lora_b"] = values.draw((case.W, rank), wide)
    for name in ("teacher_x", "teacher_logits", "teacher_lora_x"):
        if case.shape and drawn[name] is not None:
            drawn[name] = laid_out(drawn[name], case.layout)
    op = OPS[0]
    outputs = op.definition(*op.forward_args(replace(case, mask=(False,) * 5), drawn))
    drawn["statistics"] = outputs[3]
    for name, wanted, output in zip(UPSTREAM, case.upstream, outputs, strict=False):
        drawn[name] = None
        if wanted and output is not None:
            drawn[name] = values.draw(tuple(output.shape), output.dtype)
            if output.dim():
                drawn[name] = laid_out(drawn[name], case.dy_layout)
    return drawn


HARD = {"hard_weight": 0.5, "temperature": 0.7}
CAPPED = {**HARD, "softcap": 30.0, "teacher_softcap": 20.0}
COMMON = {
    **PLAIN, "ignored": "some", "bias": False, "teacher_bias": False,
    "mask": (True, True, False), "token_weight": False, "chunk_bytes": None,
    "softcap": None, "teacher_softcap": None, "logit_scale": 1.0, "teacher_logit_scale": 1.0,
    "soft_weight": 1.0, "hard_weight": 0.0, "rank": None, "teacher_rank": None,
    "return_entropy": False,
}  # fmt: skip


def described(form: str, sampled: Fields, needed: int) -> OpUnderTest:
    """Return an entry whose sample has every option in use, and several chunks."""
    return head(
        "linear_divergence_forward",
        form=form,
        case_type=TwoHeadsCase,
        tensors=tensors,
        needed=needed,
        computed={
            "student_softcap": lambda case, tensors: case.softcap,
            "student_logit_scale": lambda case, tensors: case.logit_scale,
        },
        gradients=HEAD,
        no_gradient=(*INPUTS[2:4], *INPUTS[5:], *TEACHER_LORA),
        sampled={
            **SIZES, "E": 6, "temperature": 0.8, "teacher_temperature": 1.3, "softcap": 3.0,
            "teacher_softcap": 4.0, "logit_scale": 0.7, "teacher_logit_scale": 1.2,
            "soft_weight": 0.6, "hard_weight": 0.4, "token_weight": True, "return_entropy": True,
            "reduction": form, **sampled,
        },
        forms=head_forms(
            HARD, CAPPED, {**CAPPED, "W": 1500}, {**CAPPED, "kind": "tvd"},
            {**CAPPED, "W": 1500, "kind": "cosine"},
            sizes=[
                {"D": D, "V": V, "E": E, "W": V}
                for D, E, V in ((512, 256, 100), (512, 256, 1023), (3584, 5120, 151936))
            ],
            common=COMMON,
        ),
        # A whole row of each head, and two passes over rows of different lengths.
        compiled=[
            {**COMPILED, **CAPPED, "V": V, "W": V + 32, "soft_weight": 0.5, "logit_scale": 0.5,
             "by_logits": True}
            for V in (100, 9000)
            if form == "mean"
        ],
        rowwise=(),
    )  # fmt: skip


OPS = (
    described("mean", {"W": 9, "teacher_rank": 8, "beta": 0.3, "num_items": True}, 4),
    described("none", {"W": 8, "kind": "reverse_kl", "by_logits": True}, 8),
)
