"""linear_top_k_divergence under test, in the form of linear_top_k_divergence_forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from liger_ops import library
from linear_cross_entropy_cases import LORA, HeadCase, lora_of, tensors_of
from op_under_test import DEVICE, OpUnderTest, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class TopKCase(HeadCase):
    """A drawn use of linear_top_k_divergence. chunk_bytes holds a few tokens, or a few words, of
    the logits; mask says which of x, weight and bias, and upstream which results have a gradient.
    `ignored` says how many tokens, and entries of the others, list no word."""

    # Listed words of a token, at most V.
    K: int = 3
    temperature: float = 1.0
    upstream: tuple[bool, ...] = (True, True)
    chunk_bytes: int | None = 100

    @property
    def options(self) -> tuple[Any, ...]:
        dtype = self.dtype if self.accumulate_narrow else None
        return (self.temperature, self.softcap, self.logit_scale, dtype, self.chunk_bytes)


INPUTS = ("x", "weight", "teacher_ids", "bias")
UPSTREAM = ("dlogits", "drest")
RESULTS = ("logits", "rest", "rest_error")


def ids_of(case: TopKCase) -> torch.Tensor:
    """Different words for each token."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    order = torch.rand((*case.shape, case.V), generator=generator).argsort(-1)
    ids = order[..., : case.K]
    missing = {"none": 0, "some": 0.3, "all": 1}[case.ignored]
    of_tokens = torch.rand(case.shape, generator=generator) < missing
    of_entries = torch.rand(ids.shape, generator=generator) < missing
    left_out = of_tokens.unsqueeze(-1) | of_entries
    negative = -torch.randint(1, 200, ids.shape, generator=generator)
    return torch.where(left_out, negative, ids).to(DEVICE, case.target_dtype)


def tensors(case: TopKCase) -> Tensors:
    x, weight, _, bias, *_ = tensors_of(case)
    given: Tensors = dict(zip(INPUTS, (x, weight, ids_of(case), bias), strict=True))
    given.update(zip(LORA, lora_of(case), strict=True))
    forward = library.OPS["linear_top_k_divergence_forward"].definition
    given.update(zip(RESULTS, forward(*forward_args(case, given)), strict=True))
    values = Values(case.seed + 1)
    for name, result, wanted in zip(UPSTREAM, RESULTS, case.upstream, strict=False):
        shape, dtype = tuple(given[result].shape), given[result].dtype
        drawn = values.draw(shape, dtype if wanted else None)
        layout = case.dy_layout if shape else "contiguous"
        given[name] = None if drawn is None else laid_out(drawn, layout)
    return given


def forward_args(case: TopKCase, tensors: Tensors) -> tuple[Any, ...]:
    lora = [tensors[name] for name in LORA if case.rank is not None]
    return (*(tensors[name] for name in INPUTS), *case.options, *lora)


def backward_args(case: TopKCase, tensors: Tensors) -> tuple[Any, ...]:
    values = (tensors[name] for name in (*UPSTREAM, *INPUTS, *RESULTS))
    return (*values, *case.options, list(case.mask), *(tensors[name] for name in LORA))


def sample(dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> TopKCase:
    """Every option in use, in several chunks of tokens and of words, with finite results. All sizes
    differ, because tracing would treat equal ones as one size."""
    options = {"temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7, "ignored": "none"}
    chunk_bytes = 4 * 7 * dtype.itemsize
    sizes = {"shape": (rows, 2), "D": 4, "V": 7, "K": 6, "rank": 5}
    return TopKCase(**sizes, dtype=dtype, chunk_bytes=chunk_bytes, **{**options, **form})


OPS = (
    # tests/ops/test_linear_top_k_divergence.py checks its kernels with bounds of their own.
    OpUnderTest(
        name="linear_top_k_divergence_forward",
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=("x", "weight", "bias", *LORA),
        gradients_from=UPSTREAM,
        no_gradient=("teacher_ids",),
        output_magnitudes=lambda case, tensors: [],
        gradient_magnitudes=lambda case, tensors: [],
        sample=sample,
        per_row=("x", "teacher_ids", "lora_x", *RESULTS, *UPSTREAM),
        leading=("x",),
        multiplies=True,
        autocast_as="linear",
    ),
)
