"""TRL's trainers compute the same losses, but where docs/losses.md says that they differ.

The trainers' own methods run on stand-ins for the trainer, its accelerator and its model.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops.losses import cpo_loss, dpo_loss, grpo_loss, kto_kl, kto_loss, orpo_loss, simpo_loss
from liger_ops.losses.pair_losses import OF_DIFFERENCES, PAIR_LOSSES, SORTED
from liger_ops.losses.policy_terms import POLICY_TERMS
from loss_calls import inputs

trl = pytest.importorskip("trl", reason="the losses are those of TRL's trainers")

LOG_SUM_OF_SQUARES = -0.9


class Accelerator:
    """One process, to which nothing has to be gathered."""

    device, num_processes, sync_gradients = torch.device("cpu"), 1, True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def gather_for_metrics(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model


class StandIn(torch.nn.Module):
    """A model whose head gives these log-probabilities, for the tokens from the second on."""

    def __init__(self, log_prob: Tensor) -> None:
        super().__init__()
        zeros = torch.zeros_like(log_prob)
        self.outputs = SimpleNamespace(
            log_probs=log_prob, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
            log_sum_sq_probs=torch.full_like(log_prob, LOG_SUM_OF_SQUARES),
        )  # fmt: skip

    def forward(self, **_: Any) -> Any:
        return self.outputs


def trainer(model: Any, ref_model: Any = None, **fields: Any) -> Any:
    metrics = {"train": defaultdict(list)}
    return SimpleNamespace(
        model=model, ref_model=ref_model, accelerator=Accelerator(), aux_loss_enabled=False,
        _metrics=metrics, _total_train_tokens=0, _tp_size=1, **fields,
    )  # fmt: skip


def batch(rows: int = 6, tokens: int = 5) -> dict[str, Tensor]:
    """Completions that start somewhere and go on to their end, as TRL's collators make them."""
    x = inputs(rows, tokens)
    starts = torch.tensor([0, 1, 2, 0, 3, 1])[:rows, None]
    ends = torch.tensor([5, 4, 5, 3, 5, 2])[:rows, None]
    position = torch.arange(tokens)
    x["mask"] = (position >= starts) & (position < ends)
    for key in ("log_prob", "ref_log_prob", "old_log_prob"):
        x[key] = x[key] * x["mask"]
    return x


def unshifted(mask: Tensor) -> Tensor:
    """The mask of the tokens, the first of which no position predicts."""
    return torch.cat([torch.zeros_like(mask[:, :1]), mask], 1).long()


def trl_dpo(x: dict[str, Tensor], types: list[str], **options: Any) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    fields: dict[str, Any] = {
        "loss_types": types, "loss_weights": [1.0] * len(types), "label_smoothing": 0.0,
        "beta": 0.3, "ld_alpha": None, "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5, "use_weighting": False, "precompute_ref_logps": False,
        "args": SimpleNamespace(discopop_tau=0.4, gradient_checkpointing_kwargs=None), **options,
    }  # fmt: skip
    model = StandIn(x["log_prob"])
    stub = trainer(model, StandIn(x["ref_log_prob"]), **fields)
    mask = unshifted(x["mask"])
    given = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    return DPOTrainer._compute_loss(stub, model, given, False)


@pytest.fixture(autouse=True)
def without_checkpointing(monkeypatch):
    from contextlib import nullcontext

    from trl.trainer import dpo_trainer, kto_trainer

    for module in (dpo_trainer, kto_trainer):
        monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())


def same(ours: Tensor, theirs: Tensor, x: dict[str, Tensor], of: str = "log_prob") -> None:
    """The values are close, and the gradients at the kept tokens, of which TRL takes the sums."""
    torch.testing.assert_close(ours, theirs)
    of_ours, of_theirs = (
        torch.autograd.grad(loss, x[of], retain_graph=True)[0] for loss in (ours, theirs)
    )
    assert not of_ours[~x["mask"]].any()
    torch.testing.assert_close(of_ours, of_theirs.masked_fill(~x["mask"], 0.0))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_dpo(name):
    x = batch()
    x["log_prob"].requires_grad_()
    smoothing = 0.1 if name in ("exo_pair", "robust", *SORTED) else 0.0
    ours = dpo_loss(
        x["log_prob"], x["mask"], x["ref_log_prob"], beta=0.3, loss_type=name,
        label_smoothing=smoothing, discopop_tau=0.4,
    ).loss  # fmt: skip
    theirs = trl_dpo(x, [name], label_smoothing=smoothing)
    same(ours, theirs, x)


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", sorted(OF_DIFFERENCES - {"exo_pair"}))
def test_dpo_of_f_divergences(kind, name):
    """TRL's alpha is 1 minus the paper's: both agree at 0.5 alone."""
    x = batch()
    x["log_prob"].requires_grad_()
    for alpha in (0.5, 0.3):
        ours = dpo_loss(
            x["log_prob"], x["mask"], x["ref_log_prob"], beta=0.3, loss_type=name,
            discopop_tau=0.4, f_divergence_type=kind, f_alpha_divergence_coef=alpha,
        ).loss  # fmt: skip
        options = {"f_divergence_type": kind, "f_alpha_divergence_coef": 1 - alpha}
        same(ours, trl_dpo(x, [name], **options), x)


def test_dpo_of_several_losses_and_shared_lengths():
    x = batch()
    x["log_prob"].requires_grad_()
    types, weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    options = {"loss_weights": weights, "ld_alpha": 0.4}
    ours = dpo_loss(
        x["log_prob"], x["mask"], x["ref_log_prob"], beta=0.3, loss_type=types, **options
    )
    same(ours.loss, trl_dpo(x, types, **options), x)


def test_dpo_of_weighted_pairs():
    """WPO's weights, of which the policy's log-probabilities have no gradient."""
    x = batch()
    x["log_prob"].requires_grad_()
    mask = x["mask"]
    means = ((x["log_prob"].detach() - LOG_SUM_OF_SQUARES) * mask).sum(1) / mask.sum(1)
    chosen, rejected = means.exp().chunk(2)
    ours = dpo_loss(x["log_prob"], mask, x["ref_log_prob"], beta=0.3, pair_weight=chosen * rejected)
    same(ours.loss, trl_dpo(x, ["sigmoid"], use_weighting=True), x)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_kto(name):
    from trl.trainer.kto_trainer import KTOTrainer

    x = batch()
    x["log_prob"].requires_grad_()
    mismatched = {key: x[key].detach().roll(1, 0) for key in ("log_prob", "ref_log_prob", "mask")}
    of_kl = iter([mismatched["log_prob"].sum(-1), mismatched["ref_log_prob"].sum(-1)])
    labels = torch.tensor([True, False, True, True, False, False])
    model = StandIn(x["log_prob"])
    stub = trainer(
        model, StandIn(x["ref_log_prob"]), _compute_kl_logps=lambda *_: next(of_kl),
        precompute_ref_logps=False, calculate_KL=name == "kto", loss_type=name, beta=0.3,
        desirable_weight=1.2, undesirable_weight=0.7,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    mask = unshifted(x["mask"])
    given = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    theirs = KTOTrainer._compute_loss(stub, model, {**given, "label": labels}, False)
    kl = kto_kl(mismatched["log_prob"], mismatched["mask"], mismatched["ref_log_prob"])
    ours = kto_loss(
        x["log_prob"], x["mask"], labels, x["ref_log_prob"], kl if name == "kto" else None,
        loss_type=name, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7,
    )  # fmt: skip
    same(ours.loss, theirs, x)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo(name):
    cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    x = batch()
    x["log_prob"].requires_grad_()
    options = {"beta": 0.3, "alpha": 0.0}
    if name == "simpo":
        ours = simpo_loss(x["log_prob"], x["mask"], gamma=0.4, **options)
    else:
        ours = cpo_loss(x["log_prob"], x["mask"], loss_type=name, **options)
    sums = x["log_prob"].sum(-1)
    of_pairs = sums / x["mask"].sum(-1) if name in ("ipo", "simpo") else sums
    stub = trainer(None, loss_type=name, beta=0.3, alpha=0.0, simpo_gamma=0.4, label_smoothing=0.0)
    losses, *rewards = cpo_trainer.CPOTrainer.cpo_loss(stub, *of_pairs.chunk(2))
    same(ours.loss, losses.mean(), x)
    torch.testing.assert_close(ours.chosen_rewards, rewards[0])
    torch.testing.assert_close(ours.rejected_rewards, rewards[1])


def test_orpo():
    orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    x = batch()
    x["log_prob"].requires_grad_()
    means = x["log_prob"].sum(-1) / x["mask"].sum(-1)
    stub = trainer(None, beta=0.3)
    losses, *_ = orpo_trainer.ORPOTrainer.odds_ratio_loss(stub, *means.chunk(2))
    same(orpo_loss(x["log_prob"], x["mask"], beta=0.3, alpha=0.0).loss, -losses.mean(), x)


def trl_grpo(x: dict[str, Tensor], name: str, level: str, **options: Any) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = {
        "use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "steps_per_generation": 1, **options,
    }  # fmt: skip
    values = (x["log_prob"], x["entropy"], None)
    given = {
        "prompt_ids": x["mask"].long(), "prompt_mask": x["mask"].long(),
        "completion_ids": x["mask"].long(), "completion_mask": x["mask"].long(),
        "advantages": x["advantages"], "old_per_token_logps": x["old_log_prob"],
        "ref_per_token_logps": x["ref_log_prob"], "num_items_in_batch": x["items"],
        "importance_sampling_ratio": x["vllm_is_ratio"],
    }  # fmt: skip
    model = SimpleNamespace(training=True)
    stub = trainer(
        model, _get_per_token_logps_and_entropies=lambda *_, **__: values,
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
        get_gamma_weights=GRPOTrainer.get_gamma_weights, off_policy_mask_threshold=None,
        importance_sampling_level=level, beta=options.get("beta", 0.0), loss_type=name,
        epsilon_low=0.1, epsilon_high=0.3, use_vllm=True, max_completion_length=9,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        entropy_coef=options.get("entropy_coef", 0.0), use_adaptive_entropy=False,
        _entropy_bonus_enabled="entropy_coef" in options, args=SimpleNamespace(**args),
    )  # fmt: skip
    stub.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(stub, *a)
    return GRPOTrainer._compute_loss(stub, model, given)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", POLICY_TERMS)
def test_grpo(name, level):
    """With every option: sampler's ratios, KL, entropy bonus and mask, two-sided clipping."""
    if level == "sequence" and name in ("cispo", "sapo", "vespo"):
        level = "token"
    x = batch()
    x["log_prob"].requires_grad_()
    x["entropy"].requires_grad_()
    # Where no token is, TRL's ratio is 1; its VESPO takes the logarithms of those too.
    x["vllm_is_ratio"] = (x["vllm_is_ratio"] + 0.5).masked_fill(~x["mask"], 1.0)
    for options in (
        {},
        {
            "beta": 0.2,
            "use_bias_correction_kl": True,
            "entropy_coef": 0.3,
            "top_entropy_quantile": 0.4,
        },
    ):
        two_sided = {"delta": 1.4} if name not in ("cispo", "sapo", "vespo") else {}
        items = {"num_items_in_batch": x["items"]} if name in ("dapo", "cispo", "vespo") else {}
        ours = grpo_loss(
            x["log_prob"], x["advantages"], x["mask"], old_log_prob=x["old_log_prob"],
            ref_log_prob=x["ref_log_prob"], entropy=x["entropy"],
            vllm_is_ratio=x["vllm_is_ratio"], loss_type=name, importance_sampling_level=level,
            epsilon_low=0.1, epsilon_high=0.3, max_completion_length=9, **options, **two_sided,
            **items,
        ).loss  # fmt: skip
        theirs = trl_grpo(x, name, level, **options, **two_sided)
        same(ours, theirs, x)
        if options:
            same(ours, theirs, x, "entropy")
