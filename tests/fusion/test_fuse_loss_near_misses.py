"""Models whose loss `fuse` recognises, and models that nearly compute it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_models import (
    Tiny,
    assert_same_gradients,
    batch,
    causal_loss,
    gradients,
    with_fused_loss,
)
from fused_families import FAMILIES, VOCABULARY
from liger_ops.fusion import fuse, loss


def test_any_model_that_computes_it() -> None:
    model = Tiny()
    fused = with_fused_loss(model)
    output, expected = fused(**batch()), model(**batch())
    assert list(output) == ["loss"]
    torch.testing.assert_close(output["loss"], expected["loss"])
    assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))


# Each of these classes changes one thing in Tiny.


class Unshifted(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


class Smoothed(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels, label_smoothing=0.1)


class NoCount(Tiny):
    @staticmethod
    def loss_function(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kw: Any
    ) -> Tensor:
        return causal_loss(logits, labels, vocab_size, **kw)


class NoIndex(Tiny):
    @staticmethod
    def loss_function(
        logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = -100, **kw: Any
    ) -> Tensor:
        return causal_loss(logits, labels, vocab_size, **kw)


class LowPrecision(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_loss(logits, *args, **kwargs).to(logits.dtype)


class BoundLoss(Tiny):
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        return causal_loss(*args, **kwargs)


class Penalised(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return super().result(value + 1e-2 * logits.float().pow(2).sum(), logits)


class LogNormaliser(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {**super().result(value, logits), "lse": logits.float().logsumexp(-1)}


class Best(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {**super().result(value, logits), "best": logits.argmax(-1)}


class Doubled(Tiny):
    """The loss is computed from other logits than the returned ones."""

    def result(self, value: Tensor, logits: Tensor) -> Any:
        return super().result(value, 2 * logits)


class Clamped(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).clamp(-50, 50)


class Shifted(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + 0.5


class Negative(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return -self.head(hidden)


class Normalised(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).log_softmax(-1)


class Detached(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).detach()


class HalfDetached(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        half = 0.5 * self.head(hidden)
        return half + half.detach()


class OneLess(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)[:, :-1]


class Twice(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + self.head(hidden)


class ByItself(Tiny):
    """The forward computes the loss, as in older models of transformers."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(self.body(input_ids).last_hidden_state)
        return {"loss": causal_loss(logits, labels, VOCABULARY), "logits": logits}


class LogitsMasked(Tiny):
    """The attention mask changes the logits for the loss."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        self.mask = attention_mask
        return super().forward(input_ids, labels, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.mask is None else logits * self.mask.unsqueeze(-1)


class NotLinear(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, VOCABULARY), nn.Tanh())


class Deeper(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([self.head])
        del self.head

    def get_output_embeddings(self) -> nn.Module:
        return self.heads[0]


class OwnSkip(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None, skip_logits: bool = False) -> Any:
        return super().forward(input_ids, labels)


class Object(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return copy.copy(nn.Identity())


class WithOwnForward(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.forward  # type: ignore[method-assign]


class WithOwnLogits(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.logits = self.head.forward  # type: ignore[method-assign]


NOT_THIS_LOSS = "is not the cross-entropy of shifted labels"
NEAR_MISSES = {
    Unshifted: NOT_THIS_LOSS,
    Smoothed: NOT_THIS_LOSS,
    NoCount: f"its loss with num_items_in_batch {NOT_THIS_LOSS}",
    NoIndex: f"its loss with ignore_index {NOT_THIS_LOSS}",
    LowPrecision: "its loss is bfloat16 where the model is bfloat16",
    BoundLoss: "its loss_function is a method, not a function",
    Penalised: NOT_THIS_LOSS,
    LogNormaliser: "what its forward returns beside the loss depends on the logits",
    Best: "its forward needs the logits for more than the loss (IndexError",
    Doubled: "the logits of its loss are not those that it returns",
    Clamped: "its logits are not those of its head, scaled or capped",
    Shifted: "its logits are not those of its head",
    Negative: "its logits are not those of its head",
    Normalised: "its logits are not those of its head",
    Detached: "its loss has no gradient",
    HalfDetached: "its loss has another gradient",
    OneLess: "fails on the CPU with a stub for the body",
    Twice: "for labels its forward calls its head 2 times, and its loss_function 1 times",
    ByItself: "for labels its forward calls its head 1 times, and its loss_function 0 times",
    NotLinear: "its head is a torch.nn.modules.container.Sequential, not a torch.nn.Linear",
    Deeper: "its head is in a ModuleList, not a child of it",
    LogitsMasked: f"its loss with attention_mask {NOT_THIS_LOSS}",
    OwnSkip: "its forward has a skip_logits of its own",
    Object: "its forward returns a Identity, neither a tuple nor a dict",
    WithOwnForward: "the instance has a forward of its own",
    WithOwnLogits: "the instance has a logits of its own",
}


@pytest.mark.parametrize(
    ("cls", "reason"), NEAR_MISSES.items(), ids=[cls.__name__ for cls in NEAR_MISSES]
)
def test_near_miss_is_left_with_the_reason(cls: type[Tiny], reason: str) -> None:
    model = cls()
    report = fuse(model)
    assert not report
    assert type(model) is cls
    assert [(entry.where, entry.class_name) for entry in report.left] == [("", cls.__name__)]
    assert reason in report.left[0].reason


def test_models_of_other_tasks_are_named() -> None:
    """Only models whose loss takes labels are in the report."""
    left = [[entry.reason for entry in loss.fuse(f.model()).left] for f in FAMILIES[-2:]]
    assert left == [["its loss is a classifier's, of no vocabulary"], []]


def test_loss_that_forward_stops_computing_is_an_error() -> None:
    class Sometimes(Tiny):
        def forward(self, input_ids: Tensor, labels: Any = None, mode: str = "loss") -> Any:
            if mode == "loss":
                return super().forward(input_ids, labels)
            return {"logits": self.logits(self.body(input_ids))}

    model = with_fused_loss(Sometimes())
    with pytest.raises(RuntimeError, match="forward did not call loss_function for labels"):
        model(**batch(), mode="logits")
    assert list(model(**batch(), mode="logits", skip_logits=False)) == ["logits"]
