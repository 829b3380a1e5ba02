"""The ops behind TRL's functions for log-probabilities and divergences of tokens.

TRL's trainers compute log-probabilities from hidden states, in chunks of logits, by
`trl.kernels.ChunkedLogProbFunction`, and from logits by `selective_log_softmax_and_entropy`. They
compute the divergence of a student from a teacher by `ChunkedDivergenceFunction`.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from .. import linear_divergence_forward, linear_log_prob_forward, log_prob
from ..ops.heads.head import cast_as_linear
from . import trl_reference
from .replaced import Replaced

# The names by which the trainers look the functions up.
CHUNKED, FUSED = "_ChunkedLogProbFunction", "_fused_logprob_entropy"
DISTILLATION, DIVERGENCE = "trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"
ALL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_replaced = Replaced()


def install() -> None:
    """Let TRL's trainers use `linear_log_prob`, `log_prob` and `linear_divergence`.

    It applies to this process.

    SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer compute log-probabilities and
    entropies from hidden states by `ChunkedLogProbFunction`, which is replaced in
    `trl.trainer.utils` by `linear_log_prob`. DistillationTrainer computes divergences and entropies
    by `ChunkedDivergenceFunction`, which is replaced in `trl.trainer.distillation_trainer` by
    `linear_divergence`. On a GPU, log-probabilities and entropies of logits come from `log_prob`.
    The results are TRL's up to rounding; torch.compile sees one operator for each.

    If the model of a DPOTrainer, KTOTrainer, GRPOTrainer or RLOOTrainer was given to `fuse`, the
    reference model that the trainer loads is fused too, in the same parts. The trainer warns if its
    argument ref_model is not fused as the model is.

    TRL's own functions still serve a head in another dtype than the hidden states without autocast,
    a logit_scale that is not positive, hidden states and heads on two devices, a student and a
    teacher on two devices or with vocabularies of different length, and heads that DeepSpeed's
    ZeRO-3 partitions.

    `uninstall` undoes it. A second call does nothing more.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this version of TRL does not have the functions; nothing is changed.

    Example:
        >>> from liger_ops.integrations import trl
        >>> trl.install()  # doctest: +SKIP
    """
    from trl.trainer import utils

    if _replaced:
        return
    distillation: Any = None
    try:
        distillation = importlib.import_module(DISTILLATION)
    except ModuleNotFoundError as error:
        if error.name != DISTILLATION:
            raise
    for module, name in ((utils, CHUNKED), (distillation, DIVERGENCE)):
        if not hasattr(module, name):
            path = DISTILLATION if module is distillation else utils.__name__
            raise RuntimeError(
                f"liger_ops.integrations.trl.install: {path} must have {name}, which TRL 1.16 has;"
                " this version does not"
            )
    fields = {"own": getattr(utils, CHUNKED)}
    _replaced.set(utils, CHUNKED, type("LogProb", (ChunkedLogProb,), fields))
    fields = {"own": getattr(distillation, DIVERGENCE)}
    _replaced.set(distillation, DIVERGENCE, type("Divergence", (ChunkedDivergence,), fields))
    # TRL imports this function only where triton is installed.
    if hasattr(utils, FUSED):
        _replaced.set(utils, FUSED, fused_log_prob)
    trl_reference.install(_replaced)


def uninstall() -> None:
    """Restore TRL's own functions. Does nothing if `install` was not called."""
    _replaced.undo()


class ChunkedLogProb:
    """Replacement of `ChunkedLogProbFunction`, of which trainers call `apply` alone.

    `own` is TRL's class, which serves the heads that the op does not take.
    """

    own: Any = None

    @classmethod
    def apply(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float, chunk_size: int, final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0, outputs: tuple[str, ...] = ALL_OUTPUTS,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return log_prob, and each of ALL_OUTPUTS or None, as `ChunkedLogProbFunction.apply` does.

        Only TRL's own function uses chunk_size: `linear_log_prob` sizes its chunks by bytes.
        """
        x, head, added = cast_as_linear(hidden, weight, bias)
        if not _is_linear(x, head, weight) or logit_scale <= 0:
            options = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            return cls.own.apply(hidden, weight, bias, targets, *options)
        log_probs, entropy, _, mean_logits, squares, predicted, _ = linear_log_prob_forward(
            x, head, targets, added, temperature, final_logit_softcapping, logit_scale,
            return_mean_logits="mean_logits" in outputs,
            return_log_sum_sq_probs="log_sum_sq_probs" in outputs,
            return_predicted="is_top1" in outputs,
        )  # fmt: skip
        return (
            log_probs,
            entropy if "entropy" in outputs else None,
            squares,
            mean_logits,
            None if predicted is None else predicted == targets,
        )


class ChunkedDivergence:
    """Replacement of `ChunkedDivergenceFunction`, of which trainers call `apply` alone.

    `own` is TRL's class, which serves the heads that the op does not take.
    """

    own: Any = None

    @classmethod
    def apply(
        cls, student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None,
        teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None,
        beta: float, temperature: float = 1.0,
        student_logit_scale: float = 1.0, student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0, teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the divergence of each token, and the student's entropy, which has no gradient.

        The results are those of `ChunkedDivergenceFunction.apply`.
        """
        caps = (student_final_logit_softcapping, teacher_final_logit_softcapping)
        scales = (student_logit_scale, teacher_logit_scale)
        # A tensor of the teacher may require a gradient. TRL's function gives it none, and the op
        # would refuse it.
        teacher = (teacher_hidden.detach(), teacher_weight.detach())
        taught_bias = None if teacher_bias is None else teacher_bias.detach()
        x, weight, bias = cast_as_linear(student_hidden, student_weight, student_bias)
        teacher_x, taught, taught_bias = cast_as_linear(*teacher, taught_bias)
        if not (
            _is_linear(x, weight, student_weight)
            and _is_linear(teacher_x, taught, teacher_weight)
            and x.device == teacher_x.device
            and weight.shape[0] == taught.shape[0]
            and min(scales) > 0
        ):
            options = (beta, temperature, scales[0], caps[0], scales[1], caps[1])
            student = (student_hidden, student_weight, student_bias)
            return cls.own.apply(*student, teacher_hidden, teacher_weight, teacher_bias, *options)
        results = linear_divergence_forward(
            x, weight, teacher_x, taught, bias, taught_bias,
            kind="jsd", beta=beta, temperature=temperature,
            student_softcap=caps[0], teacher_softcap=caps[1],
            student_logit_scale=scales[0], teacher_logit_scale=scales[1],
            reduction="none", return_entropy=True,
        )  # fmt: skip
        return results[0], results[-1]


def _is_linear(x: Tensor, weight: Tensor, parameter: Tensor) -> bool:
    """Return whether the ops take this layer; weight is the parameter, or its cast by autocast."""
    # DeepSpeed's ZeRO-3 frees a parameter with this attribute between forward and backward.
    partitioned = hasattr(parameter, "ds_id")
    return x.dtype == weight.dtype and x.device == weight.device and not partitioned


def fused_log_prob(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `trl.kernels.selective_log_softmax_and_entropy`: zeros where row_mask is 0."""
    # No target is negative, so -100 can mark the rows that row_mask leaves out.
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    return log_prob(logits, target, temperature)
