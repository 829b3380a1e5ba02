"""Register divergence with a device's row functions.

A row function takes the options, and the logits of the student and of the teacher: any tensors
whose rows are (M, V) and (M, W). The tensors of the tokens are (M,) and contiguous:

    divergences(options, student, teacher, target, results, plan, known)
    gradients(options, grad, student, teacher, target, saved, dstudent, dteacher, hard, plan)

`known` is None if the logits are those of all classes. For a part of the classes it is (student's
lse, teacher's lse, and the rounding errors of the two), over all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .... import library
from ....ops.losses.divergence import RESULTS, limit
from ....ops.losses.log_prob import tempered
from ..tensors import flat


class DivergenceOptions(NamedTuple):
    """The options of a divergence. The temperatures are part of softcaps and scales."""

    kind: str
    beta: float
    student_scale: float
    teacher_scale: float
    student_softcap: float | None
    teacher_softcap: float | None
    ignore_index: int

    @property
    def scalars(self) -> tuple[float | None, ...]:
        """The scalar arguments of the kernels."""
        return self[1:6]


class Hard(NamedTuple):
    """The cross-entropy of the labels, whose gradient is added to the divergence's.

    `grad`, (M,), is the gradient of each token's cross-entropy; `lse` and `lse_error`, (M,), are
    those of the student's logits without the temperature. The kernel multiplies the student's
    logits by `scale` to have the logits that the labels see; with a softcap it multiplies the
    capped logits, which the temperature has divided.
    """

    grad: Tensor
    lse: Tensor
    lse_error: Tensor
    scale: float


def options_of(
    call: Any, student_softcap: float | None = None, teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
) -> DivergenceOptions:  # fmt: skip
    """Return the options of a call, with the temperatures in the softcaps and scales."""
    temperatures = (call.temperature, call.teacher_temperature or call.temperature)
    student_cap, student = tempered(temperatures[0], student_softcap, student_logit_scale)
    teacher_cap, teacher = tempered(temperatures[1], teacher_softcap, teacher_logit_scale)
    kind, beta = limit(call.kind, call.beta), call.beta
    return DivergenceOptions(
        kind, beta, student, teacher, student_cap, teacher_cap, call.ignore_index
    )


def register(device: str, divergences: Callable[..., None], gradients: Callable[..., None]) -> None:
    """Register the row functions of a device."""
    module = divergences.__module__

    @library.kernel("divergence_forward", device, module=module)
    def divergence_forward(call, *results_and_plan):
        *results, plan = results_and_plan
        results = tuple(map(flat, results))
        logits = (call.student_logits, call.teacher_logits)
        known = None
        if call.known_student_lse is not None:
            known = [flat(getattr(call, f"known_{name}")) for name in RESULTS.split()[2:]]
        divergences(options_of(call), *logits, flat(call.target), results, plan, known)

    @library.kernel("divergence_backward", device, module=module)
    def divergence_backward(call, dstudent_logits, dteacher_logits, plan):
        saved = [getattr(call, name) for name in RESULTS.split()]
        V = call.student_logits.shape[-1]
        outputs = (None if x is None else x.view(-1, V) for x in (dstudent_logits, dteacher_logits))
        gradients(
            options_of(call), call.ddivergence.reshape(-1),
            call.student_logits, call.teacher_logits, flat(call.target),
            tuple(map(flat, saved)), *outputs, None, plan,
        )  # fmt: skip
