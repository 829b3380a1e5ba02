"""Bounds of the rounding errors of linear_divergence, and the logits from which they follow."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import op_checks
from linear_divergence_cases import HEAD, LORA, UPSTREAM, TwoHeadsCase
from op_under_test import Tensors, max_abs


def logits_of(case: TwoHeadsCase, tensors: Tensors) -> list[Tensor]:
    """Compute the scaled and capped logits of the student and the teacher, in float64."""
    wide = {name: op_checks.in_float64(value) for name, value in tensors.items()}
    both = []
    for side, scale, cap in (
        ("student", case.logit_scale, case.softcap),
        ("teacher", case.teacher_logit_scale, case.teacher_softcap),
    ):
        z = wide["teacher_logits"] if side == "teacher" else None
        if z is None:
            z = F.linear(*(wide[f"{side}_{name}"] for name in ("x", "weight", "bias")))
            if wide[f"{side}_lora_x"] is not None:
                z = z + F.linear(wide[f"{side}_lora_x"], wide[f"{side}_lora_b"])
        z = z * scale
        both.append(z if cap is None else cap * torch.tanh(z / cap))
    return both


class Bounds:
    """Bounds of the errors from rounding both logits to their dtypes, and from float32.

    The logits of a head with a LoRA are rounded twice.
    """

    def __init__(self, case: TwoHeadsCase, tensors: Tensors) -> None:
        self.case, self.tensors = case, tensors
        roundings = 1 if case.rank is case.teacher_rank is None else 2
        teacher_temperature = case.teacher_temperature or case.temperature
        z, teacher_z = logits_of(case, tensors)
        dtypes = (case.dtype, case.teacher_dtype or case.dtype)
        temperatures = (case.temperature, teacher_temperature)
        self.log_q, self.log_p = z / case.temperature, teacher_z / teacher_temperature
        eps32 = torch.finfo(torch.float32).eps
        # The errors of the logits at temperature 1, and of both log-probabilities together.
        self.logit, self.logarithm, size = 0.0, 0.0, 0.0
        for x, dtype, temperature in zip((z, teacher_z), dtypes, temperatures, strict=True):
            largest = max_abs(x) + math.log(max(case.V, case.W))
            error = (roundings * torch.finfo(dtype).eps + 16 * eps32) * largest
            self.logit = max(self.logit, error)
            self.logarithm += 2 * error / temperature
            size = max(size, largest / temperature)
        self.ratio = 1 + 2 * size

    def outputs(self) -> list[float]:
        """Return bounds for each token's divergence, cross-entropy and statistics."""
        divergence = 2 * self.logarithm * self.ratio
        return [divergence, 2 * self.logit, divergence + 2 * self.logarithm + 2 * self.logit]

    def dlogits(self, soft: Tensor, hard: Tensor) -> Tensor:
        """Return bounds for the gradient of the student's logits.

        soft, hard: The gradients of each token's divergence and cross-entropy.
        """
        case, V = self.case, self.case.V
        q, p = (x.softmax(-1) for x in (self.log_q, self.log_p))
        log_q, log_p = (
            F.pad(x.log_softmax(-1), (0, max(V, case.W) - x.shape[-1]), value=-200.0)[..., :V]
            for x in (self.log_q, self.log_p)
        )
        p = F.pad(p, (0, max(0, V - case.W)))[..., :V]
        terms = (p + q) * self.ratio / case.temperature
        error = (2 * torch.finfo(case.dtype).eps + 8 * self.logarithm * self.ratio) * terms
        if case.kind == "tvd":
            # Where rounding may change the sign of p - q, the class's slope and the share change.
            near = ((log_q - log_p).abs() <= 2 * self.logarithm).double()
            share = (q * near).sum(-1, keepdim=True)
            error = error + (q * near + q * share) / case.temperature
        sharp = (self.log_q * case.temperature).softmax(-1)
        eps = torch.finfo(case.dtype).eps
        hard_error = (2 * eps + 8 * self.logit) * sharp + 2 * eps
        total = soft.abs().unsqueeze(-1) * error + hard.abs().unsqueeze(-1) * hard_error
        return total * case.logit_scale

    def gradients(self, soft: Tensor, hard: Tensor) -> list[float]:
        """Return bounds for the gradients of the student's head."""
        case = self.case
        errors = self.dlogits(soft, hard).reshape(-1, case.V)
        terms = (soft.abs() * 2 * self.ratio / case.temperature + hard.abs() * 2).reshape(-1)
        # A sum of chunks of tokens, or of words, that is rounded after each.
        narrow = torch.finfo(case.dtype).eps * case.logit_scale if case.accumulate_narrow else 0.0
        bounds = {"student_bias": max_abs(errors.sum(0))}
        for names in (HEAD[:2], LORA):
            if self.tensors[names[0]] is not None:
                x, weight = (self.tensors[name].double().abs() for name in names)
                rows = x.reshape(-1, x.shape[-1])
                of_tokens = narrow * len(rows) * max_abs((terms.unsqueeze(-1) * rows).sum(0))
                of_words = narrow * case.V * max_abs(terms) * max_abs(weight)
                bounds[names[0]] = max_abs(errors @ weight) + of_words
                bounds[names[1]] = max_abs(errors.T @ rows) + of_tokens
        return [bounds.get(name, 0.0) for name in HEAD]


def upstream(case: TwoHeadsCase, tensors: Tensors, in_forward: bool) -> tuple[Tensor, Tensor]:
    """Compute the gradients of each token's divergence and cross-entropy, in float64."""
    one = torch.ones(case.shape, dtype=torch.float64, device=tensors["student_x"].device)
    weights = one if tensors["token_weight"] is None else tensors["token_weight"].double()
    if case.has_target:
        weights = weights * (tensors["target"] != -100)
    if in_forward:
        return case.soft_weight * weights, case.hard_weight * weights
    items: Any = 1
    if case.reduction == "mean":
        number = tensors["num_items_in_batch"]
        items = weights.sum() if number is None else number
        if items == 0:
            return 0 * weights, 0 * weights
    dloss, *others = (
        torch.zeros(()) if tensors[name] is None else tensors[name].double() for name in UPSTREAM
    )
    pairs = zip((case.soft_weight, case.hard_weight), others, strict=True)
    soft, hard = ((weight * dloss + other) * weights / items for weight, other in pairs)
    return soft, hard
