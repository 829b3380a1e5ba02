"""linear_log_prob under test, in the form of linear_log_prob_forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import log_prob_cases
from liger_ops import library
from linear_cross_entropy_cases import LORA, HeadCase, lora_of, tensors_of
from log_prob_cases import ASKED, UPSTREAM
from op_under_test import OpUnderTest, Tensors, Values


@dataclass(frozen=True, kw_only=True)
class LogProbHeadCase(HeadCase):
    """A drawn use of linear_log_prob. chunk_bytes holds a few tokens, or a few words, of the
    logits; mask says which of x, weight and bias, and upstream which results have a gradient."""

    temperature: float = 1.0
    upstream: tuple[bool, ...] = (True, True, True)
    chunk_bytes: int | None = 100
    return_mean_logits: bool = False
    return_log_sum_sq_probs: bool = False
    return_predicted: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        dtype = self.dtype if self.accumulate_narrow else None
        numbers = (self.temperature, self.softcap, self.logit_scale, -100)
        return (*numbers, dtype, self.chunk_bytes)


INPUTS = ("x", "weight", "target", "bias")


def tensors(case: LogProbHeadCase) -> Tensors:
    given: Tensors = dict(zip(INPUTS, tensors_of(case), strict=False))
    given.update(zip(LORA, lora_of(case), strict=True))
    forward = library.OPS["linear_log_prob_forward"].definition
    _, given["entropy"], given["lse"], *_, given["lse_error"] = forward(*forward_args(case, given))
    values = Values(case.seed + 1)
    given.update(log_prob_cases.upstream(case.upstream, given["lse"], values, case.dy_layout))
    return given


def forward_args(case: LogProbHeadCase, tensors: Tensors) -> tuple[Any, ...]:
    asked = (getattr(case, name) for name in ASKED)
    lora = [tensors[name] for name in LORA if case.rank is not None]
    return (*(tensors[name] for name in INPUTS), *case.options, *asked, *lora)


def backward_args(case: LogProbHeadCase, tensors: Tensors) -> tuple[Any, ...]:
    values = (tensors[name] for name in (*UPSTREAM, *INPUTS, "entropy", "lse", "lse_error"))
    return (*values, *case.options, list(case.mask), *(tensors[name] for name in LORA))


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> LogProbHeadCase:
    """Every option in use, in several chunks of tokens and of words. All sizes differ, because
    tracing would treat equal ones as one size."""
    options = {"temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7, **dict.fromkeys(ASKED, True)}
    chunk_bytes = 4 * 7 * dtype.itemsize
    sizes = {"shape": (rows, 2), "D": 4, "V": 7, "rank": 5}
    return LogProbHeadCase(**sizes, dtype=dtype, chunk_bytes=chunk_bytes, **options, **form)


OPS = (
    # tests/ops/test_linear_log_prob.py checks its kernels with bounds of their own.
    OpUnderTest(
        name="linear_log_prob_forward",
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=("x", "weight", "bias", *LORA),
        gradients_from=UPSTREAM,
        no_gradient=("target",),
        output_magnitudes=lambda case, tensors: [],
        gradient_magnitudes=lambda case, tensors: [],
        sample=sample,
        per_row=("x", "target", "entropy", "lse", "lse_error", "lora_x", *UPSTREAM),
        leading=("x",),
        multiplies=True,
        autocast_as="linear",
    ),
)
