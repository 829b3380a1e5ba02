"""Losses of hidden states and a linear head, as modules.

The head is an argument of each call, so it may share its weight with an embedding.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.heads.linear_divergence import linear_divergence
from ..ops.heads.linear_log_prob import linear_log_prob
from ..ops.heads.linear_score_centering import linear_score_centering
from ..ops.heads.linear_top_k import linear_top_k
from ..ops.heads.linear_top_k_divergence import linear_top_k_divergence
from .derived import documented, no_rows, no_target
from .losses import LossModule

__all__ = [
    "LinearDivergence", "LinearLogProb", "LinearScoreCentering", "LinearTopK",
    "LinearTopKDivergence",
]  # fmt: skip


@documented(linear_log_prob)
@dataclass(eq=False, repr=False)
class LinearLogProb(LossModule):
    """The log-probability of each token's target, and the entropy, of a linear head.

    The logits are computed in chunks and not kept.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> log_prob = liger_ops.nn.LinearLogProb(temperature=0.5)
        >>> log_prob(torch.zeros(2, 8), head.weight, torch.tensor([3, -100]))[1]
        tensor([1.3863, 0.0000], grad_fn=<...>)
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100
    _: KW_ONLY
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def _check(self) -> None:
        x = no_rows(dtype=self.accum_dtype)
        self(x, x.new_empty(1, 1), no_target())

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_log_prob(x, weight, target, bias, *self.options, **lora)


@documented(linear_score_centering)
@dataclass(eq=False, repr=False)
class LinearScoreCentering(LossModule):
    """REINFORCE with a score of mean zero under the policy that sampled, of a linear head.

    The logits are computed in chunks and not kept. `liger_ops.losses.LinearScoreCenteringLoss`
    takes the arguments of trainers, and returns metrics.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> target, words = torch.tensor([3]), torch.tensor([[0, 1]])
        >>> q, advantages = torch.tensor([[0.5, 0.25]]), torch.ones(1)
        >>> centering = liger_ops.nn.LinearScoreCentering()
        >>> centering(torch.zeros(1, 8), head.weight, target, words, q.log(), advantages)[0]
        tensor(1.0397, grad_fn=<...>)
    """

    importance_sampling: str = "none"
    importance_min: float = 0.0
    importance_max: float = 2.0
    reduction: str = "mean"
    _: KW_ONLY
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def _check(self) -> None:
        x, target = no_rows(dtype=self.accum_dtype), no_target()
        listed = (target.new_empty(0, 1), x.new_empty(0, 1))
        self(x, x.new_empty(1, 1), target, *listed, x[:, 0], sampling_log_prob=x[:, 0])

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, words: Tensor,
        sampling_top_log_prob: Tensor, advantages: Tensor, bias: Tensor | None = None,
        sampling_log_prob: Tensor | None = None, num_items_in_batch: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_score_centering(
            x, weight, target, words, sampling_top_log_prob, advantages, bias, sampling_log_prob,
            num_items_in_batch, *self.options, **lora,
        )  # fmt: skip


@documented(linear_top_k)
@dataclass(eq=False, repr=False)
class LinearTopK(LossModule):
    """The k most probable words of each token, and their log-probabilities, of a linear head.

    The logits are computed in chunks and not kept.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> words, log_prob = liger_ops.nn.LinearTopK(2)(torch.zeros(1, 8), head.weight)
        >>> log_prob
        tensor([[-1.3863, -1.3863]], grad_fn=<...>)
    """

    k: int
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    _: KW_ONLY
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def _check(self) -> None:
        x = no_rows(dtype=self.accum_dtype)
        self(x, x.new_empty(max(self.k, 1), 1))

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k, *options = self.options
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_top_k(x, weight, k, bias, *options, **lora)


@documented(linear_divergence)
@dataclass(eq=False, repr=False)
class LinearDivergence(LossModule):
    """The divergence of a student's head from its teacher's, mixed with cross-entropy.

    The logits of both are computed in chunks and not kept.

    Example:
        >>> head = torch.nn.Linear(8, 2, bias=False)
        >>> divergence = liger_ops.nn.LinearDivergence("forward_kl")
        >>> divergence(torch.zeros(2, 8), head.weight, teacher_logits=torch.zeros(2, 2))[0]
        tensor(0., grad_fn=<...>)
    """

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    teacher_temperature: float | None = None
    _: KW_ONLY
    student_softcap: float | None = None
    teacher_softcap: float | None = None
    student_logit_scale: float = 1.0
    teacher_logit_scale: float = 1.0
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def _check(self) -> None:
        x = no_rows(dtype=self.accum_dtype)
        self(x, x.new_empty(1, 1), teacher_logits=x, target=no_target())

    def forward(
        self, student_x: Tensor, student_weight: Tensor,
        teacher_x: Tensor | None = None, teacher_weight: Tensor | None = None,
        student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        teacher_logits: Tensor | None = None, target: Tensor | None = None,
        token_weight: Tensor | None = None, num_items_in_batch: Tensor | None = None,
        student_lora_a: Tensor | None = None, student_lora_b: Tensor | None = None,
        student_lora_scale: float = 1.0,
        teacher_lora_a: Tensor | None = None, teacher_lora_b: Tensor | None = None,
        teacher_lora_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        lora: tuple[Any, ...] = (student_lora_a, student_lora_b, student_lora_scale)
        lora = (*lora, teacher_lora_a, teacher_lora_b, teacher_lora_scale)
        return linear_divergence(
            student_x, student_weight, teacher_x, teacher_weight, student_bias, teacher_bias,
            teacher_logits, target, token_weight, num_items_in_batch, *self.options, *lora,
        )  # fmt: skip


@documented(linear_top_k_divergence)
@dataclass(eq=False, repr=False)
class LinearTopKDivergence(LossModule):
    """The divergence of a student's head from a teacher that lists some words of each token.

    The teacher gives the log-probabilities of these words. The student's logits are computed in
    chunks and not kept.

    Example:
        >>> head = torch.nn.Linear(8, 4, bias=False)
        >>> divergence = liger_ops.nn.LinearTopKDivergence("forward_kl", tail="zero")
        >>> divergence(torch.zeros(1, 8), head.weight, torch.tensor([[3]]), torch.zeros(1, 1))
        tensor([1.3863], grad_fn=<...>)
    """

    kind: str = "jsd"
    beta: float = 0.5
    tail: str = "bucket"
    temperature: float = 1.0
    _: KW_ONLY
    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100
    accum_dtype: torch.dtype | None = None
    chunk_bytes: int | None = None

    def _check(self) -> None:
        x = no_rows(dtype=self.accum_dtype)
        self(x, x.new_empty(1, 1), no_target().new_empty(0, 1), x)

    def forward(
        self, x: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_prob: Tensor,
        bias: Tensor | None = None, target: Tensor | None = None,
        lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        tensors = (x, weight, teacher_ids, teacher_log_prob, bias, target)
        lora: dict[str, Any] = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": lora_scale}
        return linear_top_k_divergence(*tensors, *self.options, **lora)
