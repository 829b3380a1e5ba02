"""A call for each loss and loss type of `liger_ops.losses`, with every tensor that it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_ops.losses import (
    cpo_loss,
    dpo_loss,
    grpo_loss,
    kto_loss,
    orpo_loss,
    score_centering_loss,
    simpo_loss,
)
from liger_ops.losses.pair_losses import PAIR_LOSSES
from liger_ops.losses.policy_terms import POLICY_TERMS
from liger_ops.ops.losses.score_centering import WEIGHTS

Inputs = dict[str, Tensor]


def inputs(rows: int, tokens: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        "log_prob": -values(rows, tokens),
        "old_log_prob": -values(rows, tokens),
        "ref_log_prob": -values(rows, tokens),
        "entropy": values(rows, tokens),
        "vllm_is_ratio": values(rows, tokens),
        "mask": values(rows, tokens) < 0.7,
        "advantages": values(rows) - 0.5,
        "items": values(()) * 100,
    }


def dpo(x: Inputs, **options: Any) -> Any:
    return dpo_loss(x["log_prob"], x["mask"], x["ref_log_prob"], **options)


def kto(x: Inputs, **options: Any) -> Any:
    kl = x["items"] if options["loss_type"] == "kto" else None
    labels = x["advantages"] > 0
    return kto_loss(x["log_prob"], x["mask"], labels, x["ref_log_prob"], kl, **options)


def grpo(x: Inputs, **options: Any) -> Any:
    names = ("old_log_prob", "ref_log_prob", "entropy", "vllm_is_ratio")
    tensors = {name: x[name] for name in names}
    if options["loss_type"] in ("dapo", "cispo", "vespo"):
        tensors["num_items_in_batch"] = x["items"]
    return grpo_loss(x["log_prob"], x["advantages"], x["mask"], **tensors, **options)


def score_centering(x: Inputs, **options: Any) -> Any:
    # One word is listed, the sampled one.
    listed, sampled = (x[name].unsqueeze(-1) for name in ("log_prob", "ref_log_prob"))
    return score_centering_loss(
        x["log_prob"], listed, sampled, x["advantages"], x["mask"],
        sampling_log_prob=x["old_log_prob"], num_items_in_batch=x["items"], **options,
    )  # fmt: skip


def without_reference(x: Inputs, loss: Callable[..., Any], **options: Any) -> Any:
    return loss(x["log_prob"], x["mask"], **options)


def calls() -> dict[str, Callable[[Inputs], Any]]:
    """Map the name of each loss, with its type, to its call."""
    result: dict[str, Callable[[Inputs], Any]] = {}
    for name in PAIR_LOSSES:
        smoothing = 0.1 if name == "exo_pair" else 0.0
        result[f"dpo-{name}"] = partial(
            dpo, loss_type=name, label_smoothing=smoothing, ld_alpha=0.5
        )
    types = ["sigmoid", "bco_pair", "sft"]
    result["dpo-several"] = partial(dpo, loss_type=types, loss_weights=[0.8, 0.2, 1.0])
    for name in ("forward_kl", "js_divergence", "alpha_divergence"):
        result[f"dpo-{name}"] = partial(dpo, f_divergence_type=name)
    for name, loss in {"orpo": orpo_loss, "cpo": cpo_loss, "simpo": simpo_loss}.items():
        result[name] = partial(without_reference, loss=loss)
    for name in ("kto", "apo_zero_unpaired"):
        result[f"kto-{name}"] = partial(kto, loss_type=name)
    options: dict[str, Any] = {"beta": 0.1, "entropy_coef": 0.1, "max_completion_length": 9}
    options |= {"top_entropy_quantile": 0.4, "epsilon_high": 0.3, "use_bias_correction_kl": True}
    for name in POLICY_TERMS:
        result[f"grpo-{name}"] = partial(grpo, loss_type=name, **options)
    for name in WEIGHTS:
        result[f"score_centering-{name}"] = partial(score_centering, importance_sampling=name)
    return result


CALLS = calls()
