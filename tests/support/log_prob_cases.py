"""log_prob under test, in the form of log_prob_forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cross_entropy_cases import targets
from liger_ops import library
from op_under_test import Case, Magnitude, OpUnderTest, Tensors, Values, max_abs


@dataclass(frozen=True, kw_only=True)
class LogProbCase(Case):
    """A drawn use of log_prob. shape is the shape of the logits; output_mask says which results
    have a gradient."""

    target_dtype: torch.dtype = torch.int64
    # One token in this many is ignored; 0 for none, 1 for all.
    ignored: int = 3
    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    return_mean_logits: bool = False
    return_log_sum_sq_probs: bool = False
    return_predicted: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        return (self.temperature, self.softcap, self.logit_scale, self.ignore_index)

    @property
    def asked(self) -> tuple[bool, ...]:
        return tuple(getattr(self, name) for name in ASKED)


ASKED = ("return_mean_logits", "return_log_sum_sq_probs", "return_predicted")
UPSTREAM = ("dlog_prob", "dentropy", "dlse")


def tensors(case: LogProbCase) -> Tensors:
    values = Values(case.seed)
    given: Tensors = {
        "logits": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "target": targets(case),
    }
    forward = library.OPS["log_prob_forward"].definition
    _, given["entropy"], given["lse"], *_, given["lse_error"] = forward(*forward_args(case, given))
    given.update(upstream(case.output_mask, given["lse"], values, case.dy_layout))
    return given


def upstream(mask: tuple[bool, ...], lse: torch.Tensor, values: Values, layout: str) -> Tensors:
    """The gradients of the results that have one, at least that of log_prob."""
    wanted = (mask[0] or not any(mask), *mask[1:])
    layout = layout if lse.dim() else "contiguous"
    return {
        name: values.draw(tuple(lse.shape), lse.dtype if given else None, layout)
        for name, given in zip(UPSTREAM, wanted, strict=True)
    }


def forward_args(case: LogProbCase, tensors: Tensors) -> tuple[Any, ...]:
    return (tensors["logits"], tensors["target"], *case.options, *case.asked)


def backward_args(case: LogProbCase, tensors: Tensors) -> tuple[Any, ...]:
    names = (*UPSTREAM, "logits", "target", "entropy", "lse", "lse_error")
    return (*(tensors[name] for name in names), *case.options)


def sizes(case: LogProbCase, tensors: Tensors) -> tuple[float, float]:
    """The magnitudes of lse, and of the entropy."""
    x = max_abs(tensors["logits"]) * case.logit_scale
    if case.softcap is not None:
        # The rounding error of tanh is relative to 1.
        x = min(x, case.softcap) + case.softcap
    entropy = math.log(case.shape[-1])
    return x / case.temperature + entropy, entropy


def output_magnitudes(case: LogProbCase, tensors: Tensors) -> list[Magnitude]:
    lse, entropy = sizes(case, tensors)
    # The terms of the entropy cancel, and each has the rounding error of its probability.
    return [2 * lse, lse * (2 + entropy), lse, *([lse, 4 * lse] if all(case.asked[:2]) else [])]


def gradient_magnitudes(case: LogProbCase, tensors: Tensors) -> list[Magnitude]:
    lse, entropy = sizes(case, tensors)
    log_prob, dentropy, dlse = (max_abs(tensors[name]) for name in UPSTREAM)
    # A rounding error of the exponent is a relative error of the probability.
    upstream = log_prob + dlse + dentropy * (1 + entropy)
    return [upstream * (1 + lse) * case.logit_scale / case.temperature]


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> LogProbCase:
    """Every option in use; a few of the rows are ignored."""
    options = {"temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7, **dict.fromkeys(ASKED, True)}
    return LogProbCase(shape=(rows, 2, 7), dtype=dtype, **options, **form)


OPS = (
    OpUnderTest(
        name="log_prob_forward",
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=("logits",),
        gradients_from=UPSTREAM,
        no_gradient=("target",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=sample,
        per_row=("logits", "target", "entropy", "lse", "lse_error", *UPSTREAM),
        leading=(),
        autocast_as="mul.Tensor",
    ),
)
