"""Every refusal names the function, the argument, what came and what is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from liger_ops import losses

LP, MASK = -torch.rand(4, 3), torch.ones(4, 3, dtype=torch.bool)
A, LABELS, KL = torch.rand(4), torch.ones(4, dtype=torch.bool), torch.zeros(())


def dpo(log_prob: Any = LP, mask: Any = MASK, ref: Any = None, **options: Any) -> Any:
    return losses.dpo_loss(log_prob, mask, ref, **options)


def kto(labels: Any = LABELS, kl: Any = KL, **options: Any) -> Any:
    return losses.kto_loss(LP, MASK, labels, kl=kl, **options)


def grpo(advantages: Any = A, **options: Any) -> Any:
    return losses.grpo_loss(LP, advantages, MASK, **options)


LISTED = -1 - torch.rand(4, 3, 2)


def centred(top: Any = LISTED, sampled: Any = LISTED, advantages: Any = A, **options: Any) -> Any:
    return losses.score_centering_loss(LP, top, sampled, advantages, MASK, **options)


cpo, simpo, orpo = (
    lambda f=f, **options: f(LP, MASK, **options)
    for f in (losses.cpo_loss, losses.simpo_loss, losses.orpo_loss)
)
T, V = TypeError, ValueError
REFUSED = [
    (dpo, {"log_prob": [1.0]}, T, "dpo_loss: log_prob must be a tensor, got list"),
    (dpo, {"log_prob": LP.long()}, T, "log_prob must be of a floating-point dtype, got"),
    (dpo, {"log_prob": LP[0]}, V, "log_prob must be of shape (B, T), got 1 dimensions"),
    (dpo, {"log_prob": LP[:3], "mask": MASK[:3]}, V, "log_prob must hold the chosen responses"),
    (dpo, {"mask": MASK[:2]}, V, "mask must be of log_prob's shape, got (2, 3) for (4, 3)"),
    (dpo, {"mask": None}, T, "mask must be a tensor, got NoneType"),
    (dpo, {"ref": LP[:2]}, V, "ref_log_prob must be of log_prob's shape, got (2, 3)"),
    (dpo, {"ref": LP[:2, 0]}, V, "ref_log_prob must be of shape (B,) for"),
    (dpo, {"beta": 0.0}, V, "dpo_loss: beta must be above 0, got 0.0"),
    (dpo, {"beta": "1"}, T, "beta must be a number, got str"),
    (dpo, {"beta": float("nan")}, V, "beta must be above 0, got nan"),
    (dpo, {"discopop_tau": 0.0}, V, "discopop_tau must be above 0, got 0.0"),
    (dpo, {"loss_type": "kto"}, V, "loss_type must be one of sigmoid, hinge, ipo"),
    (dpo, {"loss_type": None}, T, "loss_type must be a str, or a list or tuple of them, got"),
    (dpo, {"loss_weights": 0.5}, T, "loss_weights must be a list or tuple of numbers, or None,"),
    (dpo, {"loss_type": []}, V, "loss_weights must hold a number for each loss type"),
    (dpo, {"loss_weights": [1.0, 2.0]}, V, "loss_weights must hold a number for each loss type"),
    (dpo, {"loss_weights": ["a"]}, T, "loss_weights must be a number, got str"),
    (dpo, {"label_smoothing": 1.0}, V, "label_smoothing must be at least 0 and below 1, got 1.0"),
    (dpo, {"label_smoothing": 0.5, "loss_type": "robust"}, V, "label_smoothing of robust must be"),
    (dpo, {"loss_type": "exo_pair"}, V, "label_smoothing of exo_pair must be above 0, got 0.0"),
    (dpo, {"loss_type": "hinge", "label_smoothing": 0.1}, V, "label_smoothing must be 0 for loss"),
    (dpo, {"f_divergence_type": "kl"}, V, "f_divergence_type must be one of reverse_kl,"),
    (
        dpo,
        {"f_divergence_type": "forward_kl", "loss_type": "nca_pair"},
        V,
        "f_divergence_type must be reverse_kl for the loss type nca_pair, got 'forward_kl'",
    ),
    (dpo, {"ld_alpha": 1.5}, V, "ld_alpha must be at least 0 and at most 1, got 1.5"),
    (dpo, {"reward_shift": 0.1}, V, "reward_shift must be None without the loss type bco_pair"),
    (dpo, {"reward_shift": A, "loss_type": "bco_pair"}, V, "reward_shift must be of shape ()"),
    (dpo, {"pair_weight": A}, V, "pair_weight must be of shape (B,) for"),
    (dpo, {"pair_weight": A[:2], "loss_type": "aot"}, V, "pair_weight must be None for the loss"),
    (cpo, {"loss_type": ["ipo"]}, T, "cpo_loss: loss_type must be a str, got list"),
    (cpo, {"loss_type": "simpo"}, V, "cpo_loss: loss_type must be one of sigmoid, hinge, ipo"),
    (cpo, {"loss_type": "ipo", "label_smoothing": 0.1}, V, "label_smoothing must be 0 for hinge"),
    (simpo, {"gamma": None}, T, "simpo_loss: gamma must be a number, got NoneType"),
    (orpo, {"alpha": "1"}, T, "orpo_loss: alpha must be a number, got str"),
    (orpo, {"nll_mask": MASK[0]}, V, "orpo_loss: nll_mask must be of log_prob's shape"),
    (orpo, {"nll_log_prob": MASK}, T, "orpo_loss: nll_log_prob must be of a floating-point dtype"),
    (kto, {"labels": LABELS[:2]}, V, "kto_loss: preference_labels must be of shape (B,) for"),
    (kto, {"kl": None}, T, "kto_loss: kl must be a tensor for the loss type kto"),
    (kto, {"kl": A[:3]}, V, "kto_loss: kl must be of shape (B,) for"),
    (kto, {"loss_type": "apo_zero_unpaired"}, V, "kl must be None for the loss type apo_zero_unp"),
    (kto, {"undesirable_weight": -1.0}, V, "undesirable_weight must be at least 0, got -1.0"),
    (centred, {"top": LP}, V, "top_log_prob must be of shape (B, T, K) for log_prob's (B, T), got"),
    (
        centred,
        {"sampled": LISTED[..., :1]},
        V,
        "sampling_top_log_prob must be of top_log_prob's sh",
    ),
    (centred, {"sampled": LISTED.long()}, T, "sampling_top_log_prob must be of a floating-point"),
    (centred, {"advantages": A[:2]}, V, "score_centering_loss: advantages must be of shape (B,),"),
    (centred, {"importance_sampling": "clip"}, V, "importance_sampling must be one of none, trunc"),
    (centred, {"importance_sampling": "mask"}, T, "sampling_log_prob must be a tensor if"),
    (centred, {"importance_min": 3.0}, V, "importance_max must be at least 3.0, got 2.0"),
    (centred, {"num_items_in_batch": "1"}, T, "num_items_in_batch must be a number, got str"),
    (grpo, {"advantages": A[:3]}, V, "advantages must be of shape (B,), (B, 1) or (B, T) for"),
    (grpo, {"advantages": A[:, None].expand(4, 2)}, V, "advantages must be of shape (B,), (B, 1)"),
    (grpo, {"old_log_prob": LP[:, :2]}, V, "old_log_prob must be of log_prob's shape"),
    (grpo, {"vllm_is_ratio": A[None]}, V, "vllm_is_ratio must be of shape (B,), (B, 1) or (B, T)"),
    (grpo, {"loss_type": "ppo"}, V, "loss_type must be one of grpo, bnpo, dr_grpo, dapo, luspo"),
    (grpo, {"importance_sampling_level": "x"}, V, "importance_sampling_level must be one of token"),
    (
        grpo,
        {"importance_sampling_level": "sequence", "loss_type": "sapo"},
        V,
        "importance_sampling_level must be token for cispo, sapo and vespo, got 'sequence'",
    ),
    (grpo, {"loss_type": "cispo"}, V, "epsilon_high must be a number for cispo"),
    (grpo, {"loss_type": "vespo", "delta": 2.0}, V, "delta must be None for cispo, sapo and vespo"),
    (grpo, {"loss_type": "dr_grpo"}, T, "max_completion_length of dr_grpo must be a number, got"),
    (grpo, {"loss_type": "bnpo", "num_items_in_batch": 3}, V, "num_items_in_batch must be None"),
    (grpo, {"num_items_in_batch": A}, V, "num_items_in_batch must be a number or a tensor of one"),
    (grpo, {"beta": 0.1}, T, "grpo_loss: ref_log_prob must be a tensor if beta is not 0, got None"),
    (grpo, {"use_bias_correction_kl": True}, V, "use_bias_correction_kl must be False if beta is"),
    (grpo, {"epsilon_low": -0.1}, V, "epsilon_low must be at least 0, got -0.1"),
    (grpo, {"sapo_temperature_neg": 0.0}, V, "sapo_temperature_neg must be above 0, got 0.0"),
    (grpo, {"entropy_coef": 0.1}, T, "grpo_loss: entropy must be a tensor for entropy_coef"),
    (grpo, {"top_entropy_quantile": 0.2}, T, "grpo_loss: entropy must be a tensor for"),
    (grpo, {"top_entropy_quantile": 1.2}, V, "top_entropy_quantile must be at least 0 and at most"),
    (grpo, {"entropy_threshold": 0.2}, T, "entropy_threshold must be a tensor of one number or"),
    (grpo, {"entropy_threshold": A}, V, "entropy_threshold must be a tensor of one number, got"),
    (
        grpo,
        {"entropy_threshold": KL, "top_entropy_quantile": 0.2, "entropy": -LP},
        V,
        "top_entropy_quantile must be 1 beside entropy_threshold, got 0.2",
    ),
]


@pytest.mark.parametrize(("call", "arguments", "error", "text"), REFUSED)
def test_refused(call, arguments, error, text):
    with pytest.raises(error, match=re.escape(text)) as raised:
        call(**arguments)
    assert re.match(
        r"(dpo|cpo|simpo|orpo|kto|grpo|score_centering)_loss: .*, got ", str(raised.value)
    )


@pytest.mark.parametrize(
    ("call", "arguments", "text"),
    [
        (dpo, {"loss_type": "kto"}, "dpo_loss: loss_type must be one of sigmoid"),
        (dpo, {"mask": MASK[:2]}, "dpo_loss: mask must be of log_prob's shape, got "),
        (kto, {"kl": None}, "kto_loss: kl must be a tensor for the loss type kto"),
        (grpo, {"beta": 0.1}, "grpo_loss: ref_log_prob must be a tensor if beta is not 0, got"),
        (grpo, {"advantages": A[:3]}, "advantages must be of shape (B,), (B, 1) or (B, T) for"),
    ],
)
def test_refused_with_the_same_words_while_tracing(call, arguments, text, empty_caches):
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception, match=re.escape(text)):
        compiled(**arguments)


def test_helpers_refuse():
    with pytest.raises(ValueError, match="sequence_log_prob: mask must be of log_prob's shape"):
        losses.sequence_log_prob(LP, MASK[:2])
    with pytest.raises(ValueError, match="sequence_log_prob: log_prob must hold the chosen"):
        losses.sequence_log_prob(LP[:3], MASK[:3], ld_alpha=0.5)
    with pytest.raises(ValueError, match="entropy_threshold: mask must be of entropy's shape"):
        losses.entropy_threshold(-LP, MASK[:2], 0.2)
    with pytest.raises(TypeError, match="off_policy_mask: threshold must be a number, got str"):
        losses.off_policy_mask(LP, LP, A, MASK, threshold="1")
    with pytest.raises(TypeError, match="kto_kl: ref_log_prob must be a tensor, got NoneType"):
        losses.kto_kl(LP, MASK, None)
