"""linear_top_k_divergence under test, in the form of linear_top_k_divergence_forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linear_cross_entropy_cases import LORA, SIZES, HeadCase, head, lora_of, tensors_of
from linear_log_prob_cases import COMPILED, in_words
from op_under_test import DEVICE, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class TopKCase(HeadCase):
    """A drawn call of linear_top_k_divergence. upstream says which results have a gradient, and
    `ignored` how many tokens list no word, and how many entries of other tokens are empty."""

    # The listed words of a token, at most V.
    K: int = 3
    upstream: tuple[bool, ...] = (True, True)


INPUTS = ("x", "weight", "teacher_ids", "bias")
UPSTREAM = ("dlogits", "drest")
RESULTS = ("logits", "rest", "rest_error")


def ids_of(case: TopKCase) -> torch.Tensor:
    """Draw different words for each token; a negative id stands for no word."""
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
    drawn: Tensors = dict(zip(INPUTS, (x, weight, ids_of(case), bias), strict=True))
    drawn.update(zip(LORA, lora_of(case), strict=True))
    op = OPS[0]
    drawn.update(zip(RESULTS, op.definition(*op.forward_args(case, drawn)), strict=True))
    values = Values(case.seed + 1)
    for name, result, wanted in zip(UPSTREAM, RESULTS, case.upstream, strict=False):
        shape, dtype = tuple(drawn[result].shape), drawn[result].dtype
        gradient = values.draw(shape, dtype if wanted else None)
        layout = case.dy_layout if shape else "contiguous"
        drawn[name] = None if gradient is None else laid_out(gradient, layout)
    return drawn


OPS = (
    head(
        "linear_top_k_divergence_forward",
        case_type=TopKCase,
        tensors=tensors,
        no_gradient=("teacher_ids",),
        # Every option in use, with finite results.
        sampled={
            **SIZES, "K": 6, "temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7,
            "ignored": "none",
        },
        forms=in_words(K=64, temperature=1.0, softcap=None),
        compiled=[{**COMPILED, "K": 2, "temperature": 0.7, "logit_scale": 1.0}],
    ),
)  # fmt: skip
