"""The ops behind the losses that ms-swift takes from Liger-Kernel, for GRPO and GKD."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import LinearGRPOLoss
from ..nn import LinearDivergence
from .replaced import Replaced

# GRPOTrainer imports its class when a trainer is made, GKDTrainer's module when it is imported.
GRPO = "liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss"
GKD = "swift.rlhf_trainers.gkd_trainer", "LigerFusedLinearJSDLoss"
_replaced = Replaced()


def install() -> None:
    """Let ms-swift's GRPO and GKD with `use_liger_kernel` compute their losses by the ops.

    It applies to this process. Call it before the trainer is made. `LigerFusedLinearGRPOLoss`
    becomes `liger_ops.losses.LinearGRPOLoss`, and `LigerFusedLinearJSDLoss` of GKDTrainer becomes
    `liger_ops.nn.LinearDivergence`. The losses are Liger-Kernel's up to rounding, and so are the
    metrics, for every loss type but luspo, which raises ValueError: the equations differ.
    ms-swift still asks for Liger-Kernel to be installed, and its other limits stay.

    `uninstall` undoes it. A second call does nothing more.

    Raises:
        ImportError: ms-swift or Liger-Kernel is not installed.
        RuntimeError: this version of either lacks its class; nothing is changed.

    Example:
        >>> from liger_ops.integrations import swift
        >>> swift.install()  # doctest: +SKIP
    """
    if _replaced:
        return
    modules = [importlib.import_module(path) for path, _ in (GRPO, GKD)]
    for module, (path, name) in zip(modules, (GRPO, GKD), strict=True):
        if not hasattr(module, name):
            raise RuntimeError(
                f"liger_ops.integrations.swift.install: {path} must have {name}, as with ms-swift"
                " 4.6 and Liger-Kernel 0.8; this version does not"
            )
    _replaced.set(modules[0], GRPO[1], GRPOLoss)
    _replaced.set(modules[1], GKD[1], JSDLoss)


def uninstall() -> None:
    """Restore Liger-Kernel's classes. Does nothing if `install` was not called."""
    _replaced.undo()


class GRPOLoss(nn.Module):
    """`LinearGRPOLoss` with the arguments of `LigerFusedLinearGRPOLoss` that ms-swift passes."""

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True,
        epsilon_high: float = 0.2, importance_sampling_level: str = "token", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.has_kl = beta != 0.0
        if options.get("loss_type") == "luspo":
            raise ValueError(
                "GRPOLoss: loss_type must not be luspo, whose equation in Liger-Kernel is another"
            )
        if self.has_kl and not use_ref_model:
            raise ValueError(f"GRPOLoss: use_ref_model must be True with beta={beta}, got False")
        self.loss = LinearGRPOLoss(
            beta=beta, epsilon_high=epsilon_high,
            importance_sampling_level=importance_sampling_level, **options,
        )  # fmt: skip

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor,
        attention_mask: Tensor, advantages: Tensor, bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None, old_per_token_logps: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Return the loss and a tuple: the mean of KL, unless beta is 0, and the clip ratio."""
        target = selected_token_ids.masked_fill(attention_mask == 0, self.loss.ignore_index)
        found = self.loss(
            _input, lin_weight, target, advantages, bias, ref_log_prob=ref_per_token_logps,
            old_log_prob=old_per_token_logps, vllm_is_ratio=vllm_is_ratio,
        )  # fmt: skip
        ratios = [x for x in (found.clip_ratio_low, found.clip_ratio_high) if x is not None]
        clipped = sum(ratios, start=torch.zeros_like(found.loss.detach()))
        return found.loss, ((found.kl, clipped) if self.has_kl else (clipped,))


class JSDLoss(nn.Module):
    """`LinearDivergence` with the arguments of `LigerFusedLinearJSDLoss` that ms-swift passes."""

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5,
        compiled: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        weights: Any = {"hard_weight": weight_hard_loss, "soft_weight": weight_soft_loss}
        self.loss = LinearDivergence(**weights, **options)

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor, true_labels: Tensor, student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss of hidden states (..., D) and labels (...)."""
        return self.loss(
            student_input, student_weight, teacher_input, teacher_weight, target=true_labels,
            student_bias=student_bias, teacher_bias=teacher_bias,
        )[0]  # fmt: skip
