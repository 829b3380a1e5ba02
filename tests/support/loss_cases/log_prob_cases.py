"""log_prob under test, in the form of log_prob_forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cross_entropy_cases import LOGITS, TARGETS, targets, vocabularies
from launch_forms import Forms, loss_forms, shapes
from liger_ops import library
from op_under_test import DEVICE, SAME, Magnitude, OpUnderTest, Tensors, Values, drawn_for, max_abs

# Targets of a token: None for one, or K. Some of the K are equal, and some ignored.
K = (None, None, 1, 4, 20)
# The options that ask for further results.
ASKED = ("return_mean_logits", "return_log_sum_sq_probs", "return_predicted")
UPSTREAM = ("dlog_prob", "dentropy", "dlse")


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    drawn: Tensors = {
        "logits": values.draw(case.shape, SAME, case.layout, case.scale),
        "target": targets(case) if case.K is None else words(case, case.shape[-1]),
    }
    forward = library.OPS["log_prob_forward"].definition
    options = (case.temperature, case.softcap, case.logit_scale, case.ignore_index)
    results = forward(*drawn.values(), *options)
    _, drawn["entropy"], drawn["lse"], *_, drawn["lse_error"] = results
    # output_mask says which results have a gradient.
    drawn.update(upstream(case.output_mask, results[:3], values, case.dy_layout))
    return drawn


def words(case: Any, V: int) -> torch.Tensor:
    """Draw K words for each token from a few, so that some are equal. Of some tokens all are
    ignored, and of others some."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    tokens = case.shape if hasattr(case, "D") else case.shape[:-1]
    listed = torch.randint(0, min(V, 2 * case.K), (*tokens, case.K), generator=generator)
    listed = (listed * 7 + case.seed) % V
    share = {"none": 0.0, "some": 0.3, "all": 1.0}.get(case.ignored)
    share = share if share is not None else (1.0 / case.ignored if case.ignored else 0.0)
    whole = torch.rand((*tokens, 1), generator=generator) < share
    ignored = whole | (torch.rand(listed.shape, generator=generator) < share)
    ignore_index = getattr(case, "ignore_index", -100)
    return torch.where(ignored, ignore_index, listed).to(DEVICE, case.target_dtype)


def upstream(
    mask: tuple[bool, ...], results: Sequence[torch.Tensor], values: Values, layout: str
) -> Tensors:
    """Draw the gradients of the results that have one, at least one of them."""
    wanted = (mask[0] or not any(mask), *mask[1:])
    return {
        name: values.draw(
            tuple(result.shape), result.dtype if given else None,
            layout if result.dim() else "contiguous",
        )
        for name, result, given in zip(UPSTREAM, results, wanted, strict=True)
    }  # fmt: skip


def sizes(case: Any, tensors: Tensors) -> tuple[float, float]:
    """Return the magnitudes of lse, and of the entropy."""
    x = max_abs(tensors["logits"]) * case.logit_scale
    if case.softcap is not None:
        x = min(x, case.softcap)
    entropy = math.log(case.shape[-1])
    return x / case.temperature + entropy, entropy


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude | None]:
    lse, entropy = sizes(case, tensors)
    # The terms of the entropy cancel, and each has the rounding error of its probability.
    return [
        2 * lse, lse * (2 + entropy), lse, lse if case.return_mean_logits else None,
        4 * lse if case.return_log_sum_sq_probs else None,
    ]  # fmt: skip


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    lse, entropy = sizes(case, tensors)
    log_prob, dentropy, dlse = (max_abs(tensors[name]) for name in UPSTREAM)
    # A rounding error of the exponent is a relative error of the probability.
    upstream = log_prob * (case.K or 1) + dlse + dentropy * (1 + entropy)
    return [upstream * (1 + lse) * case.logit_scale / case.temperature]


EVERYTHING = dict.fromkeys(ASKED, True)
NOTHING = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, **dict.fromkeys(ASKED, False)}

OPS = (
    OpUnderTest(
        name="log_prob_forward",
        choices={
            **TARGETS, **LOGITS, "temperature": (1.0, 0.6, 2.5), "K": K,
            **dict.fromkeys(ASKED, (False, True)),
        },
        tensors=tensors,
        no_gradient=("target",),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        # Every option in use; a few of the rows are ignored.
        cases=vocabularies(4096, 50257, 151936, temperature=0.7),
        sampled={"temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7, **EVERYTHING},
        forms=loss_forms(
            {"temperature": 0.7}, {"temperature": 0.7, "softcap": 30.0}, {"return_predicted": True},
            {"temperature": 0.7, "softcap": 30.0, **EVERYTHING},
            # The logits of ignored tokens are not read.
            common=NOTHING, optional_at=(1, 2, 3, 5), backward=True, counted={"ignored": 0},
        ),
        compiled=[
            {**form, "temperature": 0.7, "output_mask": (True, True, False), **more}
            for form in shapes((4, 100), (4, 4096), (4, 32768), (4, 128256))
            for more in ({}, {"softcap": 30.0, "logit_scale": 0.5, **EVERYTHING})
        ],
        shaping=(),
        autocast_as="mul.Tensor",
    ),
)  # fmt: skip
# K targets a token, of which some are equal; the kernels are those of one.
OPS += (
    replace(OPS[0], form="words", sampled={**OPS[0].sampled, "K": 4}, cases={},
            forms=Forms(shapes=()), compiled=()),
)  # fmt: skip
