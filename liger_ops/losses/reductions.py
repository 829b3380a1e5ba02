"""Reductions of the losses of tokens to that of a batch. Policy losses differ in the divisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .sequences import batch_mean, token_counts


class Divisors(NamedTuple):
    """The mask, and the caller's numbers for the whole batch."""

    mask: Tensor
    max_completion_length: int | None
    num_items_in_batch: Tensor | float | None


def per_sequence(losses: Tensor, divisors: Divisors) -> Tensor:
    tokens = token_counts(divisors.mask, losses.dtype).clamp(min=1)
    return batch_mean(losses.sum(-1) / tokens)


def per_token(losses: Tensor, divisors: Divisors) -> Tensor:
    return losses.sum() / divisors.mask.sum().clamp(min=1)


def per_item(losses: Tensor, divisors: Divisors) -> Tensor:
    items = divisors.num_items_in_batch
    if items is None:
        return per_token(losses, divisors)
    if isinstance(items, Tensor):
        items = items.detach().to(losses.device, losses.dtype, non_blocking=True)
        return losses.sum() / items.clamp(min=1).reshape(())
    return losses.sum() / max(items, 1)


def per_length(losses: Tensor, divisors: Divisors) -> Tensor:
    assert divisors.max_completion_length is not None  # grpo_loss checks it.
    return batch_mean(losses.sum(-1)) / divisors.max_completion_length


def summed(losses: Tensor, divisors: Divisors) -> Tensor:
    return batch_mean(losses.sum(-1))


REDUCTIONS: dict[str, Callable[[Tensor, Divisors], Tensor]] = {
    **dict.fromkeys(("grpo", "sapo"), per_sequence), "bnpo": per_token, "dr_grpo": per_length,
    **dict.fromkeys(("dapo", "cispo", "vespo"), per_item), "luspo": summed,
}  # fmt: skip
OF_ITEMS = tuple(name for name, reduction in REDUCTIONS.items() if reduction is per_item)
