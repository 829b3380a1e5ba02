"""Losses of post-training from hidden states: modules that compute a head and then a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.heads.linear_log_prob import linear_log_prob
from ..ops.heads.linear_score_centering import linear_score_centering, targets_of
from ..ops.tensors import widened
from .checks import check_items, check_per_sequence, check_shape, check_tensor
from .dpo import dpo_loss
from .grpo import PolicyOutput, grpo_loss
from .kto import kto_loss
from .outputs import PreferenceOutput, UnpairedPreferenceOutput
from .policy_terms import column, item_count
from .reference_free import cpo_loss, orpo_loss, simpo_loss
from .score_centering import CenteredOutput, check_listed, score_centering_loss

# lora_a, lora_b and lora_scale of `liger_ops.linear_log_prob`.
Lora = tuple[Tensor, Tensor, float]


class LinearLoss(nn.Module):
    """Base class of the modules of this file, with the options of the head and of the loss.

    The head is an argument of each call, so that it may share its weight with an embedding. Its
    logits are computed in chunks and not kept: see `liger_ops.linear_log_prob` for precision and
    memory. The target of a position is the token that its hidden state predicts: shift the labels
    beforehand.

    The head may have a LoRA, lora=(lora_a, lora_b, lora_scale), as a keyword of each call: with
    peft, `lora_A[name].weight`, `lora_B[name].weight` and `scaling[name]` of the head. This LoRA is
    the policy's alone. The reference has no LoRA, as with peft's adapters disabled, or its own in
    ref_lora. Dropout before the LoRA is not computed.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`; they apply to the reference too.
        options: the options of the loss that are numbers or names.
    """

    loss: ClassVar[Callable[..., Any]]

    def __init__(
        self, *, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
        ignore_index: int = -100, accum_dtype: torch.dtype | None = None,
        chunk_bytes: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index = ignore_index
        self.head_options: dict[str, Any] = {
            "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale,
            "ignore_index": ignore_index, "accum_dtype": accum_dtype, "chunk_bytes": chunk_bytes,
        }  # fmt: skip
        self.options = options
        # Raises the loss's own errors for wrong options now, not at the first forward.
        self._call(torch.empty(0, 1, device="meta"))

    def _call(self, values: Tensor) -> Any:
        """Call the loss with arbitrary values, of no tokens, so that it checks its options."""
        return self._of(values, values > 0)

    def _of(self, *arguments: Any, **options: Any) -> Any:
        return type(self).loss(*arguments, **options, **self.options)

    def log_prob(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        lora: Lora | None = None, name: str = "lora",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return each target's log-probability, and the entropy; 0 where target is ignore_index."""
        options = {**self.head_options, **self._lora(lora, name)}
        return linear_log_prob(x, weight, target, bias, **options)

    def _lora(self, lora: Lora | None, name: str = "lora") -> dict[str, Any]:
        """Return the keyword arguments of a head's LoRA."""
        if lora is None:
            return {}
        if not isinstance(lora, tuple) or len(lora) != 3:
            raise TypeError(
                f"{type(self).__name__}: {name} must be a tuple (lora_a, lora_b, lora_scale) or"
                f" None, got {type(lora).__name__}"
            )
        return dict(zip(("lora_a", "lora_b", "lora_scale"), lora, strict=True))

    def reference(
        self, target: Tensor, ref_x: Tensor | None, ref_weight: Tensor | None,
        ref_bias: Tensor | None, ref_log_prob: Tensor | None, ref_lora: Lora | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Return the reference's log-probabilities, or None without a reference.

        They are ref_log_prob or, with ref_x, computed from the hidden states.
        """
        name = type(self).__name__
        if ref_x is None:
            if ref_lora is not None:
                raise ValueError(f"{name}: ref_lora must be None without ref_x, got a tuple")
            return ref_log_prob
        if ref_log_prob is not None:
            raise ValueError(f"{name}: ref_log_prob must be None beside ref_x, got a tensor")
        check_tensor(name, "ref_weight", ref_weight)
        assert ref_weight is not None
        with torch.no_grad():
            return self.log_prob(ref_x, ref_weight, target, ref_bias, ref_lora, "ref_lora")[0]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearDPOLoss(LinearLoss):
    """`dpo_loss` of a linear head, from hidden states.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`.
        options: beta, loss_type and the other options of `dpo_loss`, except its tensors.

    Shape:
        x: (2B, T, D), the hidden states of the chosen responses, then of the rejected ones.
        weight: (V, D). bias: (V,), or None.
        target: (2B, T), int64 or int32, ignore_index where a token is not part of a response.
        ref_x, ref_weight, ref_bias: the same for the reference; or ref_log_prob, as for `dpo_loss`.
        reward_shift, pair_weight: as for `dpo_loss`.
        lora, ref_lora: (lora_a, lora_b, lora_scale) of `liger_ops.linear_log_prob`, or None: a LoRA
            of the head, and of the reference's head.

    Returns:
        PreferenceOutput.

    Raises:
        TypeError, ValueError, IndexError: see `dpo_loss` and `liger_ops.linear_log_prob`.

    Example:
        >>> x, weight = torch.zeros(2, 3, 8), torch.zeros(4, 8)
        >>> loss = liger_ops.losses.LinearDPOLoss(beta=0.1, loss_type="sigmoid")
        >>> loss(x, weight, torch.tensor([[1, 2, -100], [3, 0, 1]])).loss
        tensor(0.6262)
    """

    loss = staticmethod(dpo_loss)

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_x: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, *, ref_log_prob: Tensor | None = None,
        lora: Lora | None = None, ref_lora: Lora | None = None, **tensors: Any,
    ) -> PreferenceOutput:  # fmt: skip
        log_prob, _ = self.log_prob(x, weight, target, bias, lora)
        ref = self.reference(target, ref_x, ref_weight, ref_bias, ref_log_prob, ref_lora)
        return self._of(log_prob, target != self.ignore_index, ref, **tensors)


class _LinearReferenceFreeLoss(LinearLoss):
    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None, *, lora: Lora | None = None,
    ) -> PreferenceOutput:  # fmt: skip
        mask = target != self.ignore_index
        if nll_target is None:
            return self._of(self.log_prob(x, weight, target, bias, lora)[0], mask)
        check_tensor(type(self).__name__, "nll_target", nll_target)
        check_shape(type(self).__name__, "nll_target", nll_target, target, "target")
        # The chosen hidden states come twice, first for nll_target and then for target: the first
        # 2B rows begin with the values of nll_target, and the last 2B rows are those of target.
        rows = x.shape[0]
        pairs = rows // 2
        x = torch.cat([x.narrow(0, 0, pairs), x])
        targets = torch.cat([nll_target.narrow(0, 0, pairs), target])
        log_prob, _ = self.log_prob(x, weight, targets, bias, lora)
        return self._of(
            log_prob.narrow(0, pairs, rows), mask,
            nll_mask=nll_target != self.ignore_index, nll_log_prob=log_prob.narrow(0, 0, rows),
        )  # fmt: skip


class LinearORPOLoss(_LinearReferenceFreeLoss):
    """`orpo_loss` of a linear head, from hidden states.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`.
        options: beta and alpha of `orpo_loss`.

    Shape:
        x, weight, target, bias: as for `LinearDPOLoss`.
        nll_target: (2B, T); target if None. Its first half are the tokens whose loss is added, and
            ignore_index elsewhere. With it, the logits of the chosen hidden states are computed
            twice. If nll_target is target with more tokens, such as those of the prompt, they can
            be computed once: by `liger_ops.linear_log_prob` with nll_target, and `orpo_loss` with a
            mask and nll_mask.
        lora: as for `LinearDPOLoss`.

    Returns:
        PreferenceOutput.

    Raises:
        TypeError, ValueError, IndexError: see `orpo_loss` and `liger_ops.linear_log_prob`.
    """

    loss = staticmethod(orpo_loss)


class LinearCPOLoss(_LinearReferenceFreeLoss):
    """`cpo_loss` of a linear head, from hidden states.

    The arguments of each call, the results and the errors are those of `LinearORPOLoss`; the
    options are beta, alpha, loss_type, label_smoothing and average_log_prob of `cpo_loss`.
    """

    loss = staticmethod(cpo_loss)


class LinearSimPOLoss(_LinearReferenceFreeLoss):
    """`simpo_loss` of a linear head, from hidden states.

    The arguments of each call, the results and the errors are those of `LinearORPOLoss`; the
    options are beta, gamma, alpha and label_smoothing of `simpo_loss`.
    """

    loss = staticmethod(simpo_loss)


class LinearKTOLoss(LinearLoss):
    """`kto_loss` of a linear head, from hidden states.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`.
        options: beta, loss_type and the other options of `kto_loss`, except its tensors.

    Shape:
        x: (B, T, D). weight, bias: as for `LinearDPOLoss`. target: (B, T).
        preference_labels, kl: as for `kto_loss`.
        ref_x, ref_weight, ref_bias, ref_log_prob, lora, ref_lora: as for `LinearDPOLoss`.

    Returns:
        UnpairedPreferenceOutput.

    Raises:
        TypeError, ValueError, IndexError: see `kto_loss` and `liger_ops.linear_log_prob`.
    """

    loss = staticmethod(kto_loss)

    def _call(self, values: Tensor) -> Any:
        has_kl = self.options.get("loss_type", "kto") == "kto"
        return self._of(values, values > 0, values[:, 0], kl=values.sum() if has_kl else None)

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor,
        bias: Tensor | None = None, ref_x: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        kl: Tensor | None = None, *, ref_log_prob: Tensor | None = None,
        lora: Lora | None = None, ref_lora: Lora | None = None,
    ) -> UnpairedPreferenceOutput:  # fmt: skip
        log_prob, _ = self.log_prob(x, weight, target, bias, lora)
        ref = self.reference(target, ref_x, ref_weight, ref_bias, ref_log_prob, ref_lora)
        return self._of(log_prob, target != self.ignore_index, preference_labels, ref, kl)


class LinearGRPOLoss(LinearLoss):
    """`grpo_loss` of a linear head, from hidden states.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_log_prob`. The temperature is that of the sampling.
        options: loss_type, beta, epsilon_low and the other options of `grpo_loss`, except its
            tensors.

    Shape:
        x: (B, T, D). weight, bias: as for `LinearDPOLoss`.
        target: (B, T), int64 or int32: the sampled tokens; ignore_index for a token that is not
            kept.
        advantages, old_log_prob, vllm_is_ratio, policy_mask, entropy_threshold,
            num_items_in_batch: as for `grpo_loss`.
        ref_x, ref_weight, ref_bias: the same for the reference; or ref_log_prob, (B, T).
        lora, ref_lora: as for `LinearDPOLoss`.

    Returns:
        PolicyOutput.

    Raises:
        TypeError, ValueError, IndexError: see `grpo_loss` and `liger_ops.linear_log_prob`.
    """

    loss = staticmethod(grpo_loss)

    def _call(self, values: Tensor) -> Any:
        tensors = {"ref_log_prob": values, "entropy": values}
        return self._of(values, values[:, 0], values > 0, **tensors)

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor,
        bias: Tensor | None = None, ref_x: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, *,
        ref_log_prob: Tensor | None = None, lora: Lora | None = None,
        ref_lora: Lora | None = None, **tensors: Any,
    ) -> PolicyOutput:  # fmt: skip
        log_prob, entropy = self.log_prob(x, weight, target, bias, lora)
        ref = self.reference(target, ref_x, ref_weight, ref_bias, ref_log_prob, ref_lora)
        given = {"ref_log_prob": ref, "entropy": entropy, **tensors}
        return self._of(log_prob, advantages, target != self.ignore_index, **given)


class LinearScoreCenteringLoss(LinearLoss):
    """`score_centering_loss` of a linear head, from hidden states.

    `liger_ops.linear_score_centering` computes the loss, and its gradient in the forward: in
    training the head takes three matrix products. They are four if per_token_loss has a gradient.

    Args:
        temperature, softcap, logit_scale, ignore_index, accum_dtype, chunk_bytes: as for
            `liger_ops.linear_score_centering`. The temperature is that of the sampling.
        options: importance_sampling, importance_min and importance_max of `score_centering_loss`.

    Shape:
        x: (B, T, D). weight, bias: as for `LinearDPOLoss`.
        target: (B, T), int64 or int32: the sampled tokens; ignore_index for a token that is not
            kept.
        words: (B, T, K), of target's dtype: the words that the sampler lists. Where
            sampling_top_log_prob is -inf, any value may stand. A word that is listed again is left
            out.
        sampling_top_log_prob, advantages, sampling_log_prob, num_items_in_batch: as for
            `score_centering_loss`.
        lora: as for `LinearDPOLoss`.

    Returns:
        CenteredOutput.

    Raises:
        TypeError, ValueError, IndexError: see `score_centering_loss` and
            `liger_ops.linear_score_centering`.
    """

    loss = staticmethod(score_centering_loss)

    def _call(self, values: Tensor) -> Any:
        listed = values.unsqueeze(-1)
        tensors = {"sampling_log_prob": values}
        return self._of(values, listed, listed, values[:, 0], values > 0, **tensors)

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, words: Tensor,
        sampling_top_log_prob: Tensor, advantages: Tensor, bias: Tensor | None = None, *,
        sampling_log_prob: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None, lora: Lora | None = None,
    ) -> CenteredOutput:  # fmt: skip
        name = type(self).__name__
        check_tensor(name, "words", words)
        check_listed(name, "sampling_top_log_prob", sampling_top_log_prob, target, "target")
        check_shape(name, "words", words, sampling_top_log_prob, "sampling_top_log_prob")
        check_per_sequence(name, "advantages", advantages, target, "target")
        check_items(name, num_items_in_batch)
        mask, top = target != self.ignore_index, sampling_top_log_prob.detach()
        advantages = widened(column(advantages).detach()).expand_as(target)
        sampled = None if sampling_log_prob is None else sampling_log_prob.detach()
        items = item_count(num_items_in_batch, mask, widened(x[:0]).dtype)
        if not isinstance(items, Tensor):
            items = advantages.new_full((), items)
        loss, log_prob = linear_score_centering(
            x, weight, target, words, top, advantages, bias, sampled, items,
            **self.options, **self.head_options, **self._lora(lora),
        )  # fmt: skip
        _, listed = targets_of(target, words, top, self.ignore_index)
        of_sampled, of_listed = log_prob.split([1, words.shape[-1]], -1)
        # Not `_replace`, which Dynamo of torch 2.11 does not trace.
        _, *of_tokens = self._of(
            of_sampled.squeeze(-1), of_listed, top.masked_fill(~listed, -torch.inf), advantages,
            mask, sampling_log_prob=sampled,
        )  # fmt: skip
        return CenteredOutput(loss, *of_tokens)
