"""Log-probabilities and entropies of tokens as training code computes them, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

utils = pytest.importorskip("trl.trainer.utils", reason="some of the code is TRL's")
entropy_from_logits, selective_log_softmax = utils.entropy_from_logits, utils.selective_log_softmax

# A function of logits and of labels that are all in range.
Spelling = Callable[[Tensor, Tensor], Any]


def trl_log_prob(logits: Tensor, labels: Tensor) -> Tensor:
    """Loop over rows as TRL does, with logsumexp in float32 and with log_softmax in bfloat16."""
    return selective_log_softmax(logits[:, :-1], labels[:, 1:], temperature=0.7)


def verl_log_prob(logits: Tensor, labels: Tensor) -> Tensor:
    """Loop over chunks as verl and OpenRLHF do; rows have no batch dimension."""
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if logits.dtype is torch.float32:
        chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.cat([part.logsumexp(-1) for part in logits.split(4)])
    rows = zip(logits.chunk(2), labels.chunk(2), strict=True)
    return torch.cat(
        [F.log_softmax(x, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1) for x, y in rows]
    )


def negated_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.float().view(-1, logits.shape[-1])
    return -F.cross_entropy(rows, labels.view(-1), reduction="none", ignore_index=0)


def capped_then_tempered(logits: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(logits.float() * 0.5 / 3.0) * 3.0 / 0.7
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def negated_twice(logits: Tensor, labels: Tensor) -> Tensor:
    negative = -F.log_softmax(logits.float(), -1)
    return (-negative).gather(-1, labels[..., None])[..., 0]


LOG_PROBS: dict[str, Spelling] = {
    "trl": trl_log_prob, "verl": verl_log_prob, "negated-cross-entropy": negated_cross_entropy,
    "capped-then-tempered": capped_then_tempered, "negated-twice": negated_twice,
}  # fmt: skip


def by_log_probs(logits: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits.float() / 0.7, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def by_softmax_and_log_softmax(logits: Tensor) -> Tensor:
    p, log_p = torch.softmax(logits, -1), torch.log_softmax(logits, -1)
    return torch.sum(-p * log_p, dim=-1, keepdim=True)


def by_logsumexp(logits: Tensor) -> Tensor:
    """Compute the entropy as verl, OpenRLHF and TRL's PPO do."""
    p = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)


ENTROPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "log-probs": by_log_probs,
    "softmax-and-log-softmax": by_softmax_and_log_softmax,
    "logsumexp": by_logsumexp,
    "trl": lambda logits: entropy_from_logits(logits, chunk_size=4),
    "one-chunk": entropy_from_logits,
    "rows": lambda logits: torch.stack([by_logsumexp(row / 2.0) for row in logits.unbind(0)]),
}


def shared_log_probs(logits: Tensor, labels: Tensor) -> Any:
    log_probs = logits.float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def trl_both(logits: Tensor, labels: Tensor) -> Any:
    """Compute both as TRL's GRPO: completion tokens, divided by the temperature before."""
    logits, labels = logits[:, :-1, :][:, -3:, :] / 0.7, labels[:, -3:]
    return selective_log_softmax(logits, labels), entropy_from_logits(logits)


def verl_both(logits: Tensor, labels: Tensor) -> Any:
    """Compute both as verl: the entropy first, from rows."""
    rows = logits.view(-1, logits.shape[-1])
    entropy = by_logsumexp(rows)
    chosen = rows.gather(-1, labels.view(-1, 1)).squeeze(-1)
    return entropy, chosen - torch.logsumexp(rows, dim=-1)


def cross_entropy_and_entropy(logits: Tensor, labels: Tensor) -> Any:
    """Compute both; an ignored token has an entropy, but a loss of 0."""
    rows = logits.flatten(0, 1)
    loss = F.cross_entropy(rows, labels.flatten(), reduction="none", ignore_index=4)
    return loss, by_logsumexp(logits)


def with_lse(logits: Tensor, labels: Tensor) -> Any:
    """Compute both, and a z-loss."""
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - lse, by_logsumexp(logits), lse.square()


def parts_apart(logits: Tensor, labels: Tensor) -> Any:
    chosen = logits.gather(-1, labels.unsqueeze(-1))
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen.tanh(), logits.logsumexp(-1).square(), entropy


BOTH: dict[str, Spelling] = {
    "shared": shared_log_probs, "trl": trl_both, "verl": verl_both,
    "cross-entropy": cross_entropy_and_entropy, "lse": with_lse, "parts": parts_apart,
}  # fmt: skip


def trl_metric(logits: Tensor, labels: Tensor) -> Any:
    """Compute both as TRL's GRPO without an entropy bonus: the entropy has no gradient."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    arguments = {"entropy_requires_grad": False, "temperature": 0.7}
    return utils.selective_log_softmax_and_entropy(logits, labels, **arguments)


def metric_first(logits: Tensor, labels: Tensor) -> Any:
    """Compute the entropy first, without a gradient, but read the labels before."""
    index = labels.unsqueeze(-1)
    with torch.no_grad():
        entropy = by_logsumexp(logits)
    return entropy.mean(), logits.log_softmax(-1).gather(-1, index)


def metric_of_shared_log_probs(logits: Tensor, labels: Tensor) -> Any:
    log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


METRICS: dict[str, Spelling] = {
    "trl": trl_metric,
    "first": metric_first,
    "shared": metric_of_shared_log_probs,
}
