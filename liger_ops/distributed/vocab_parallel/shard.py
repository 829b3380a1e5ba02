"""The part of a vocabulary that a rank has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.heads.head import HEAD
from ...record import Op
from .collectives import start_sum, wait

# The mark of a token that does not count. It is no word's index, as the user's may be of a shard.
IGNORED = -100
# The tensors of a head that every rank has.
SHARED = ("x", "lora_x")

# One for each rank.
ClassSums = Tensor | tuple[int, ...]


class VocabShard(NamedTuple):
    """Words first to first + held - 1 of V, on one rank of the group of this name, of which no rank
    has more than `most`. Where `sums_x`, the gradients of what every rank has are summed over the
    ranks; otherwise each rank is left with its part of the sum."""

    group: str
    rank: int
    ranks: int
    first: int
    held: int
    V: int
    most: int
    sums_x: bool

    @staticmethod
    def of_rank(group: str, rank: int, ranks: int, V: int, sums_x: bool = False) -> VocabShard:
        """A rank's words of V, as `torch.chunk` splits them."""
        most = -(-V // ranks)
        first = min(rank * most, V)
        return VocabShard(group, rank, ranks, first, min(first + most, V) - first, V, most, sums_x)

    def here(self, target: Tensor) -> Tensor:
        return (target >= self.first) & (target < self.first + self.held)

    def local(self, target: Tensor, ignore_index: int) -> Tensor:
        """Targets counted from the rank's first word. A target of another rank is some word of this
        one, because an op treats an ignored token in another way."""
        word = (target - self.first).clamp(0, max(self.held - 1, 0))
        return torch.where(target == ignore_index, IGNORED, word)

    def valid(self, target: Tensor, ignore_index: int) -> Tensor:
        return (target == ignore_index) | ((target >= 0) & (target < self.V))

    def of(self, whole: Tensor | None) -> Tensor | None:
        """The rank's part of a tensor with an element for each word."""
        return None if whole is None else whole[self.first : self.first + self.held]

    def class_sums(self, class_weight: Tensor | None, dtype: torch.dtype) -> ClassSums:
        """The sum of the weights of each rank's words, from those of all words."""
        if class_weight is None:
            firsts = (min(rank * self.most, self.V) for rank in range(self.ranks))
            return tuple(min(self.V - first, self.most) for first in firsts)
        missing = self.ranks * self.most - self.V
        padded = torch.nn.functional.pad(class_weight.to(dtype), (0, missing))
        return padded.view(self.ranks, self.most).sum(-1)

    def no_statistics(self, call: Any, target: Tensor, count: int) -> Tensor:
        """The statistics of a rank without words: lse, which is -inf, and zeros."""
        x = call.x if hasattr(call, "x") else call.logits
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        zeros = x.new_zeros((count, *target.shape), dtype=dtype)
        return torch.cat([torch.full_like(zeros[:1], float("-inf")), zeros[1:]])

    def gradients(self, op: Op, call: Any) -> tuple[Tensor | None, ...]:
        """The results of a backward op, from its call of the rank's words. A rank without words
        calls no op."""
        if not hasattr(call, "x"):
            return (op.overload(*call) if self.held else torch.zeros_like(call.logits),)
        if self.held:
            found = list(op.overload(*call))
        else:
            pairs = zip(HEAD, call.output_mask, strict=True)
            found = [torch.zeros_like(getattr(call, n)) if wanted else None for n, wanted in pairs]
        if self.sums_x:
            shared = [i for i in map(HEAD.index, SHARED) if found[i] is not None]
            sums = [start_sum(found[i], self.group) for i in shared]
            for i, total in zip(shared, sums, strict=True):
                found[i] = wait(total)
        return tuple(found)
