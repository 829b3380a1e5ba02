"""The forms of the losses' calls, for `launch_cases`."""

from __future__ import annotations

from typing import Any

from launch_forms import (
    FP32,
    ROWS,
    Fields,
    Forms,
)

# Turns off the options that the samples of the losses use.
PLAIN_LOSS = {
    "weight_dtype": None,
    "token_weight_dtype": None,
    "has_items": False,
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "return_predicted": False,
    "return_entropy": False,
}
SMOOTHED = {"label_smoothing": 0.1, "lse_square_scale": 0.01}
VOCABULARIES = (2, 100, 1023, 4096, 32000, 128256, 151937)


def loss() -> Forms:
    def form(V: int, M: int = ROWS, **fields: Any) -> Fields:
        return {"shape": (M, V), **PLAIN_LOSS, **fields}

    return Forms(
        shapes=tuple(form(V) for V in VOCABULARIES),
        options=(
            SMOOTHED,
            {**SMOOTHED, "weight_dtype": FP32},
            {"softcap": 30.0},
            {"logit_scale": 0.5},
            {"return_predicted": True},
            {"return_entropy": True},
            {
                **SMOOTHED,
                "weight_dtype": FP32,
                "token_weight_dtype": FP32,
                "softcap": 30.0,
                "logit_scale": 0.5,
                "return_predicted": True,
                "return_entropy": True,
            },
        ),
        optional_at=(1, 2, 3, 5),
        counted={i: {"shape": (rows, VOCABULARIES[i])} for i, rows in {3: 3, 4: 2, 5: 1}.items()},
        executed=(
            form(300, M=7, tile=(4, 64)),
            form(100, M=5, tile=(2, 128)),
            form(300, M=7, tile=(1, 64)),
            form(5000, M=3),
        ),
    )


PLAIN_LOG_PROB = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0}
ASKED = ("return_mean_logits", "return_log_sum_sq_probs", "return_predicted")
PLAIN_LOG_PROB |= dict.fromkeys(ASKED, False)


def log_prob() -> Forms:
    def form(V: int, M: int = ROWS, **fields: Any) -> Fields:
        return {"shape": (M, V), **PLAIN_LOG_PROB, **fields}

    return Forms(
        shapes=tuple(form(V) for V in VOCABULARIES),
        options=(
            {"temperature": 0.7},
            {"temperature": 0.7, "softcap": 30.0},
            {"return_predicted": True},
            {"temperature": 0.7, "softcap": 30.0, **dict.fromkeys(ASKED, True)},
        ),
        backward_options=({"output_mask": (True, False, False)},),
        optional_at=(1, 2, 3, 5),
        # The logits of ignored tokens are not read.
        counted={
            i: {"shape": (rows, VOCABULARIES[i]), "ignored": 0}
            for i, rows in {3: 3, 4: 2, 5: 1}.items()
        },
        executed=(
            form(300, M=7, tile=(4, 64)),
            form(100, M=5, tile=(2, 128)),
            form(300, M=7, tile=(1, 64)),
            form(5000, M=3),
        ),
    )


PLAIN_DIVERGENCE = {"beta": 0.5, "temperature": 1.0, "teacher_temperature": None, "ignored": None}


def divergence(*options: Fields) -> Forms:
    def form(V: int, M: int = ROWS, **fields: Any) -> Fields:
        return {"shape": (M, V), **PLAIN_DIVERGENCE, **fields}

    return Forms(
        shapes=tuple(form(V) for V in VOCABULARIES),
        options=options,
        backward_options=({"output_mask": (True, False, False)},),
        optional_at=(1, 3, 5),
        counted={i: {"shape": (rows, VOCABULARIES[i])} for i, rows in {3: 3, 4: 2, 5: 1}.items()},
        executed=(
            form(300, M=7, tile=(4, 64)),
            form(100, M=5, tile=(2, 128)),
            form(300, M=7, tile=(1, 64)),
            form(5000, M=3),
            form(300, M=7, tile=(2, 128), kind="cosine"),
        ),
    )


PLAIN_DISTRIBUTIONS = {"ignored": None, "zeros": False, "reduction": "batchmean"}


def distributions(*options: Fields) -> Forms:
    def form(V: int, M: int = ROWS, **fields: Any) -> Fields:
        return {"shape": (M, V), **PLAIN_DISTRIBUTIONS, **fields}

    return Forms(
        shapes=tuple(form(V) for V in VOCABULARIES),
        options=options,
        backward_options=({"output_mask": (True, False, False)},),
        optional_at=(1, 3, 5),
        counted={i: {"shape": (rows, VOCABULARIES[i])} for i, rows in {3: 3, 4: 2, 5: 1}.items()},
        executed=(
            form(300, M=7, tile=(4, 64)),
            form(100, M=5, tile=(2, 128)),
            form(300, M=7, tile=(1, 64)),
            form(5000, M=3),
        ),
    )


def head() -> Forms:
    plain = {"class_weight": False, "token_weight": False, "num_items": False, "rows": None}
    plain |= {"label_smoothing": 0.0, "lse_square_scale": 0.0, "softcap": None, "logit_scale": 1.0}
    return Forms(
        shapes=tuple(
            {"shape": (ROWS,), "D": D, "V": V, **plain} for D, V in ((512, 1023), (4096, 128256))
        ),
        options=({**SMOOTHED, "class_weight": True, "softcap": 30.0, "logit_scale": 0.5},),
        optional_at=(0, 1),
        counted={},
        # It uses the kernels of cross_entropy; the products between them are not Triton's.
        executed=(),
    )


def log_prob_head(**plain: Any) -> Forms:
    plain = {"bias": False, "mask": (True, True, False), "chunk_bytes": None, **plain}
    return Forms(
        shapes=tuple(
            {"shape": (ROWS,), "D": D, "V": V, **plain} for D, V in ((512, 1023), (3584, 151936))
        ),
        options=({"temperature": 0.7, "softcap": 30.0},),
        # Without the gradients of the head, the backward takes chunks of tokens.
        backward_options=({"mask": (True, False, False)},),
        optional_at=(0, 1),
        counted={},
        # It uses the kernels of cross_entropy; the products between them are not Triton's.
        executed=(),
    )


def two_heads() -> Forms:
    plain = {
        **PLAIN_DIVERGENCE, "ignored": "some", "bias": False, "teacher_bias": False,
        "mask": (True, True, False), "token_weight": False, "chunk_bytes": None,
        "softcap": None, "teacher_softcap": None, "logit_scale": 1.0, "teacher_logit_scale": 1.0,
        "soft_weight": 1.0, "hard_weight": 0.0, "rank": None, "teacher_rank": None,
        "return_entropy": False,
    }  # fmt: skip
    hard = {"hard_weight": 0.5, "temperature": 0.7}
    capped = {**hard, "softcap": 30.0, "teacher_softcap": 20.0}
    cosine = {**capped, "W": 1500, "kind": "cosine"}
    return Forms(
        shapes=tuple(
            {"shape": (ROWS,), "D": D, "V": V, "E": E, "W": V, **plain}
            for D, E, V in ((512, 256, 100), (512, 256, 1023), (3584, 5120, 151936))
        ),
        options=(hard, capped, {**capped, "W": 1500}, {**capped, "kind": "tvd"}, cosine),
        optional_at=(0, 1, 2),
        counted={},
        # The lowered code of divergence runs; the products between are not Triton's.
        executed=(),
    )
