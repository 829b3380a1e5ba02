"""varlen_attention under test, in the form of varlen_attention_forward."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from launch_forms import BF16, FP32, Fields, Forms
from liger_ops import library
from op_under_test import (
    DEVICE,
    SAME,
    X_LAYOUTS,
    Magnitude,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    max_abs,
)

# How the tokens are cut into documents: anywhere, with tokens before and behind all documents; the
# same without such tokens; a token each; or a single document among empty ones.
DOCUMENTS = ("gaps", "whole", "ones", "single")
INPUTS = ("query", "key", "value")
OPTIONS = ("window_left", "window_right", "softmax_scale", "softcap", "engine")


def bounds(case: Any) -> list[int]:
    """Draw the documents of a case: the first token of each, and the end of the last."""
    T, count = case.shape[0], case.count
    if case.documents == "ones":
        return [min(n, T) for n in range(count + 1)]
    if case.documents == "single":
        return [0 if n <= count // 2 else T for n in range(count + 1)]
    # Python's numbers, as launches are recorded from tensors without data.
    numbers = random.Random(case.seed)
    cuts = sorted(numbers.randint(0, T) for _ in range(count + 1))
    if case.documents == "whole":
        cuts[0], cuts[-1] = 0, T if count else 0
    return cuts


def key_counts(case: Any) -> list[int]:
    """Draw the number of each document's keys."""
    cuts = bounds(case)
    numbers = random.Random(case.seed + 1)
    shares = [numbers.random() for _ in range(case.count)]
    # A third of the documents have all their tokens, and a fifth have none.
    return [
        min(math.ceil(1.5 * share * (end - start)), end - start) if share > 0.2 else 0
        for share, start, end in zip(shares, cuts[:-1], cuts[1:], strict=True)
    ]


def keys_shown(case: Any) -> Tensor:
    """Draw a mask of keys: a quarter of them are hidden, or with an even seed none."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    hidden = torch.rand(case.shape[0], generator=generator) < 0.25 * (case.seed % 2)
    return ~hidden.to(DEVICE)


def longest(case: Any) -> int:
    cuts = bounds(case)
    return max((end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True)), default=0)


def ints(values: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    (T, H, D), key_heads, E = case.shape, case.key_heads, case.width
    drawn: Tensors = {
        "query": values.draw((T, H, D), SAME, case.layout, case.scale),
        "key": values.draw((T, key_heads, D), SAME, case.key_layout),
        "value": values.draw((T, key_heads, E), SAME, case.key_layout),
        "cu_seqlens": ints(bounds(case), case.index_dtype),
        "lengths": ints(key_counts(case), case.index_dtype) if case.has_lengths else None,
        "key_mask": keys_shown(case) if case.has_key_mask else None,
        "sinks": values.draw((H,), case.sinks_dtype),
        "bounds": None,
    }
    forward = library.OPS["varlen_attention_forward"].definition
    documents = (drawn["cu_seqlens"], max(1, longest(case)))
    documents = (*documents, *(drawn[name] for name in ("lengths", "key_mask", "sinks")))
    options = (getattr(case, name) for name in OPTIONS)
    drawn["y"], drawn["lse"] = forward(*(drawn[name] for name in INPUTS), *documents, *options)
    return {**drawn, "dy": values.draw((T, H, E), SAME, case.dy_layout)}


def largest_norm(tensor: Tensor | None) -> float:
    return max_abs(tensor.double().norm(dim=-1))


def factor(case: Any) -> float:
    return case.shape[-1] ** -0.5 if case.softmax_scale is None else case.softmax_scale


def scores(case: Any, tensors: Tensors) -> float:
    """Return the size of what is added and cancelled in the exponent of a softmax's weight."""
    products = factor(case) * largest_norm(tensors["query"]) * largest_norm(tensors["key"])
    # A cap is a difference of numbers as large as the cap.
    return products + (case.softcap or 0.0) + max_abs(tensors["sinks"])


def roundings(case: Any, tensors: Tensors) -> float:
    """Return the relative error of a softmax's weight in units of the checks' float32 errors.

    A score is off by a rounding of its terms, which is a relative error of its exponential. An
    operand of a product is rounded once more, to the dtype of the inputs.
    """
    stored = 0.0
    if case.dtype.itemsize == 2:
        stored = torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps / 8
    return 2 + 2 * scores(case, tensors) + math.log(longest(case) + 2) + stored


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude | None]:
    y = max_abs(tensors["value"]) * roundings(case, tensors)
    # test_varlen_attention.py has the lse of rows without keys, minus infinity.
    is_finite = bool(tensors["lse"].isfinite().all())
    return [y, 1 + scores(case, tensors) + math.log(longest(case) + 2) if is_finite else None]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    # The gradient of a score is at most this, for each unit of its weight in the softmax.
    upstream = 2 * largest_norm(tensors["dy"]) * largest_norm(tensors["value"])
    upstream *= roundings(case, tensors)
    # The queries of a key, in each head that shares it.
    queries = longest(case) * case.shape[1] // case.key_heads
    return [
        upstream * factor(case) * max_abs(tensors["key"]),
        upstream * factor(case) * max_abs(tensors["query"]) * queries,
        max_abs(tensors["dy"]) * queries * roundings(case, tensors),
        upstream * case.shape[0],
    ]


def heads(pick: Pick, fields: Fields) -> Fields:
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    key_heads, group = pick(((1, 1), (1, 3), (2, 1), (2, 2)))
    D = pick((16, 8, 33, 1))
    return {
        "shape": (pick((40, 17, 70, 33, 5, 0)), key_heads * group, D), "key_heads": key_heads,
        "width": pick((D, D, 1, 24)), "count": pick((2, 5, 3, 9, 1, 0)),
    }  # fmt: skip


# Causal attention of whole documents.
COMPILED = {
    "count": 4, "documents": "whole", "key_heads": 2, "has_lengths": False, "has_key_mask": False,
    "sinks_dtype": None,
    "window_left": -1, "window_right": 0, "softcap": None,
}  # fmt: skip
OPS = (
    OpUnderTest(
        name="varlen_attention_forward",
        choices={
            "count": (8,), "documents": DOCUMENTS, "key_heads": (1,), "width": (6,),
            "key_layout": X_LAYOUTS, "layout": X_LAYOUTS, "has_lengths": (False, True),
            "has_key_mask": (False, False, True),
            "sinks_dtype": (None, SAME, FP32), "index_dtype": (torch.int32, torch.int64),
            "window_left": (-1, -1, 0, 3, 40), "window_right": (0, 0, -1, 2, 40),
            "softmax_scale": (None, 1.0, 0.3), "softcap": (None, None, 1.5),
            "engine": ("auto", "triton"), "tile": (None,),
        },
        coupled=heads,
        tensors=tensors,
        computed={
            "scale": lambda case, tensors: case.softmax_scale,
            "max_seqlen": lambda case, tensors: max(1, longest(case)),
        },
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample_shape=lambda rows: (rows, 2, 4),
        sampled={
            "documents": "single", "has_lengths": True, "has_key_mask": True,
            "sinks_dtype": SAME, "window_left": 2,
            "window_right": 1, "softmax_scale": 0.7, "softcap": 1.5, "seed": 35,
        },
        no_gradient=("cu_seqlens", "lengths", "key_mask"),
        cases={
            # Several tiles of 32 or 64 queries and keys, some seen whole and some in part.
            "causal": {
                "shape": (75, 2, 16), "dtype": FP32, "documents": "single", "width": 16, "count": 1,
            },
            "window": {
                "shape": (85, 2, 16), "dtype": FP32, "documents": "single", "window_left": 40,
                "window_right": 36, "sinks_dtype": SAME, "has_lengths": True,
                "has_key_mask": True, "seed": 3,
            },
            "bfloat16": {
                "shape": (150, 2, 16), "dtype": BF16, "window_left": 70, "sinks_dtype": FP32,
                "count": 2, "width": 16, "documents": "whole",
            },
        },
        # An NPU has torch_npu's operator.
        forms=Forms(shapes=()),
        npu_runs_definition=True,
        # Without options, and in one dtype, because these take the compilers half a minute.
        compiled=({"shape": (64, 4, 64), "width": 64, "dtype": BF16, **COMPILED},),
        shaping=("query", "cu_seqlens"),
        rowwise=(),
        multiplies=True,
        autocast_as="scaled_dot_product_attention",
        autocast_keeps=("sinks",),
    ),
)  # fmt: skip
