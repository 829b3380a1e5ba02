"""The ops behind TRL's functions for log-probabilities of tokens.

TRL's trainers compute them from hidden states, in chunks of logits, by
`trl.kernels.ChunkedLogProbFunction`, and from logits by `selective_log_softmax_and_entropy`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import linear_log_prob_forward, log_prob
from ..ops.head import cast_as_linear
from .replaced import Replaced

# The names by which the trainers look the two functions up.
CHUNKED, FUSED = "_ChunkedLogProbFunction", "_fused_logprob_entropy"
ALL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_replaced = Replaced()


def install() -> None:
    """Put `linear_log_prob` and `log_prob` behind TRL's trainers, for this process.

    SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer compute log-probabilities and
    entropies from hidden states by `ChunkedLogProbFunction`, which is replaced in
    `trl.trainer.utils` by `linear_log_prob`. On a GPU, log-probabilities and entropies of logits
    come from `log_prob`. The results are TRL's up to rounding; torch.compile sees one operator for
    each.

    TRL's own function still serves a head in another dtype than the hidden states without autocast,
    a logit_scale that is not positive, and hidden states and heads on two devices.

    `uninstall` undoes it. Installing twice is installing once.

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
    if not hasattr(utils, CHUNKED):
        raise RuntimeError(
            f"liger_ops.integrations.trl.install: trl.trainer.utils must have {CHUNKED}, which TRL"
            " 1.16 has; this version does not"
        )
    own = {"own": getattr(utils, CHUNKED)}
    _replaced.set(utils, CHUNKED, type("LogProb", (ChunkedLogProb,), own))
    # It needs triton, and TRL imports it only where that is installed.
    if hasattr(utils, FUSED):
        _replaced.set(utils, FUSED, fused_log_prob)


def uninstall() -> None:
    """Put TRL's own functions back; nothing if `install` was not called."""
    _replaced.undo()


class ChunkedLogProb:
    """Stands for `ChunkedLogProbFunction`, which is `own`; only `apply` is called."""

    own: Any = None

    @classmethod
    def apply(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float, chunk_size: int, final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0, outputs: tuple[str, ...] = ALL_OUTPUTS,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """log_prob, and each of ALL_OUTPUTS or None, as `ChunkedLogProbFunction.apply`.

        chunk_size is for TRL's own function: `linear_log_prob` sizes its chunks by bytes.
        """
        x, head, added = cast_as_linear(hidden, weight, bias)
        if x.dtype != head.dtype or x.device != head.device or logit_scale <= 0:
            options = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            return cls.own.apply(hidden, weight, bias, targets, *options)
        log_probs, entropy, _, mean_logits, log_sum_sq_probs, predicted = linear_log_prob_forward(
            x, head, targets, added, temperature, final_logit_softcapping, logit_scale,
            return_mean_logits="mean_logits" in outputs,
            return_log_sum_sq_probs="log_sum_sq_probs" in outputs,
            return_predicted="is_top1" in outputs,
        )  # fmt: skip
        return (
            log_probs,
            entropy if "entropy" in outputs else None,
            log_sum_sq_probs,
            mean_logits,
            None if predicted is None else predicted == targets,
        )


def fused_log_prob(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `trl.kernels.selective_log_softmax_and_entropy`: zero where row_mask is 0."""
    # No target is negative, so that the number marks what row_mask leaves out.
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    return log_prob(logits, target, temperature)
