"""linear_log_prob under test, in the form of linear_log_prob_forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import log_prob_cases
from launch_forms import Forms, head_forms
from liger_ops import library
from linear_cross_entropy_cases import LORA, SIZES, HeadCase, head, lora_of, tensors_of
from log_prob_cases import ASKED, NOTHING
from op_under_test import Tensors, Values


@dataclass(frozen=True, kw_only=True)
class LogProbHeadCase(HeadCase):
    """A drawn call of linear_log_prob. upstream says which results have a gradient."""

    upstream: tuple[bool, ...] = (True, True, True)
    # Targets of a token: None for one, or K.
    K: int | None = None
    return_mean_logits: bool = False
    return_log_sum_sq_probs: bool = False
    return_predicted: bool = False


INPUTS = ("x", "weight", "target", "bias")


def tensors(case: LogProbHeadCase) -> Tensors:
    drawn: Tensors = dict(zip(INPUTS, tensors_of(case), strict=False))
    drawn.update(zip(LORA, lora_of(case), strict=True))
    if case.K is not None:
        drawn["target"] = log_prob_cases.words(case, case.V)
    forward = library.OPS["linear_log_prob_forward"].definition
    options = (case.temperature, case.softcap, case.logit_scale)
    lora = {name: drawn[name] for name in LORA}
    results = forward(*list(drawn.values())[:4], *options, **lora)
    _, drawn["entropy"], drawn["lse"], *_, drawn["lse_error"] = results
    values = Values(case.seed + 1)
    drawn.update(log_prob_cases.upstream(case.upstream, results[:3], values, case.dy_layout))
    return drawn


def in_words(**common: Any) -> Forms:
    """Return forms of backwards with chunks of words, and of tokens, as without gradients of the
    head."""
    return head_forms(
        {"temperature": 0.7, "softcap": 30.0},
        sizes=({"D": 512, "V": 1023}, {"D": 3584, "V": 151936}),
        backward=({"mask": (True, False, False)},),
        common={"bias": False, "mask": (True, True, False), "chunk_bytes": None, **common},
    )


COMPILED = {"shape": (4,), "D": 64, "V": 4, "rank": None}

OPS = (
    head(
        "linear_log_prob_forward",
        case_type=LogProbHeadCase,
        tensors=tensors,
        no_gradient=("target",),
        sampled={
            **SIZES, "temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7,
            **dict.fromkeys(ASKED, True),
        },
        forms=in_words(**NOTHING),
        compiled=[{**COMPILED, "temperature": 0.7}],
    ),
)  # fmt: skip
OPS += (
    replace(
        OPS[0],
        form="words",
        sampled={**OPS[0].sampled, "K": 6},
        forms=Forms(shapes=()),
        compiled=(),
    ),
)
