"""linear_top_k under test, in the form of linear_top_k_forward."""

from __future__ import annotations

from dataclasses import dataclass

import log_prob_cases
from launch_forms import Forms
from linear_cross_entropy_cases import LORA, SIZES, HeadCase, head, lora_of, tensors_of
from op_under_test import Tensors, Values

INPUTS = ("x", "weight", "bias")
RESULTS = ("log_prob", "lse", "words", "lse_error")


@dataclass(frozen=True, kw_only=True)
class TopKCase(HeadCase):
    """A drawn call of linear_top_k. upstream says which results have a gradient."""

    # At most V.
    k: int = 3
    upstream: tuple[bool, ...] = (True, True)


def tensors(case: TopKCase) -> Tensors:
    x, weight, _, bias, *_ = tensors_of(case)
    drawn: Tensors = dict(zip(INPUTS, (x, weight, bias), strict=True))
    drawn.update(zip(LORA, lora_of(case), strict=True))
    op = OPS[0]
    results = op.definition(*op.forward_args(case, drawn))
    drawn.update(zip(RESULTS, results, strict=True))
    values = Values(case.seed + 1)
    grads = log_prob_cases.upstream((*case.upstream, False), results[:3], values, case.dy_layout)
    return {**drawn, "dlog_prob": grads["dlog_prob"], "dlse": grads["dentropy"]}


OPS = (
    head(
        "linear_top_k_forward",
        case_type=TopKCase,
        tensors=tensors,
        sampled={**SIZES, "k": 6, "temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7},
        # The kernels are those of log_prob.
        forms=Forms(shapes=()),
    ),
)
