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
        hidden = self.body(input_ids)
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
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


class OwnLoss(Tiny):
    """The loss is a module of the model."""

    loss_function = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.body(input_ids)
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        value = self.criterion(logits.flatten(0, 1), labels.flatten())  # type: ignore[union-attr]
        return self.result(value, logits)


class Weighted(ByItself):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.rand(VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.body(input_ids)
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        logits = logits.view(-1, VOCABULARY)
        return self.result(F.cross_entropy(logits, labels.view(-1), self.weights), logits)


class WithoutHead(ByItself):
    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head.weight)


class Nested(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {"loss": value, "all": [logits]}


class WithOwnForward(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.forward  # type: ignore[method-assign]


class WithOwnLogits(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.logits = self.head.forward  # type: ignore[method-assign]


FOUND = [
    Tiny, Unshifted, Smoothed, NoCount, NoIndex, LowPrecision, BoundLoss, Doubled, ByItself,
    OwnLoss,
]  # fmt: skip


@pytest.mark.parametrize("cls", FOUND)
def test_any_model_that_computes_it(cls: type[Tiny]) -> None:
    model = cls()
    fused = with_fused_loss(model)
    ways: list[dict[str, Any]] = [{}]
    if cls in (Tiny, NoCount, NoIndex, LowPrecision, BoundLoss):
        ways += [{"num_items_in_batch": 5}, {"ignore_index": 7}]
    for way in ways:
        inputs = {**batch(), **way}
        if "ignore_index" in way:
            inputs["labels"] = inputs["labels"].where(inputs["labels"] > 20, 7)
        output, expected = fused(**inputs), model(**inputs)
        assert list(output) == ["loss"]
        torch.testing.assert_close(output["loss"], expected["loss"])
        assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))
    model.bfloat16(), fused.bfloat16()
    assert fused(**batch())["loss"].dtype is model(**batch())["loss"].dtype


NEAR_MISSES = {
    Penalised: "its forward applies pow to its logits",
    LogNormaliser: "its forward applies logsumexp to its logits",
    Best: "its forward applies argmax to its logits",
    Clamped: "its forward applies clamp to its logits",
    Shifted: "its forward applies add to its logits",
    Negative: "its forward applies neg to its logits",
    Normalised: "its forward applies log_softmax to its logits",
    Detached: "its forward applies detach to its logits",
    HalfDetached: "its forward applies detach to its logits",
    OneLess: "with a stub for the body (ValueError: there are not as many labels as logits)",
    Twice: "its forward applies add to its logits",
    Weighted: "its forward applies cross_entropy to its logits, with its buffer weights",
    WithoutHead: "its forward computes no cross_entropy of its head's output",
    Nested: "its forward returns its logits within another value",
    NotLinear: "its head is a torch.nn.modules.container.Sequential, not a torch.nn.Linear",
    Deeper: "its head is in a ModuleList, not a child of it",
    LogitsMasked: "with attention_mask, its forward applies mul to its logits",
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


def test_a_forward_that_computes_no_loss() -> None:
    class Sometimes(Tiny):
        def forward(self, input_ids: Tensor, labels: Any = None, mode: str = "loss") -> Any:
            if mode == "loss":
                return super().forward(input_ids, labels)
            return {"logits": self.logits(self.body(input_ids))}

    model = Sometimes()
    fused = with_fused_loss(model)
    with pytest.warns(UserWarning, match="its forward computed no loss of its head's logits"):
        output = fused(**batch(), mode="logits")
    assert torch.equal(output["logits"], model(**batch(), mode="logits")["logits"])
    with pytest.raises(ValueError, match="skip_logits=True and its forward computed no loss"):
        fused(**batch(), mode="logits", skip_logits=True)
    with pytest.raises(ValueError, match="reduction is computed by the cross_entropy"):
        fused(**batch(), mode="logits", reduction="sum")
