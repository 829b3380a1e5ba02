"""Models whose loss `fuse` recognises, and models that nearly compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(logits.float().view(-1, vocab_size), labels, label_smoothing=0.1)


def without_a_count(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
) -> Tensor:
    return causal_loss(logits, labels, vocab_size, **kwargs)


def without_an_index(
    logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = -100, **kwargs: Any
) -> Tensor:
    return causal_loss(logits, labels, vocab_size, **kwargs)


def in_low_precision(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return causal_loss(logits, *args, **kwargs).to(logits.dtype)


def half_detached(self: Tiny, hidden: Tensor) -> Tensor:
    half = 0.5 * self.head(hidden)
    return half + half.detach()


def with_loss_of(value: Callable[[Tiny, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward that computes the loss of logits and labels itself, as older models do."""

    def forward(self: Tiny, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.body(input_ids)
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        return {"loss": value(self, logits, labels), "logits": logits}

    return forward


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


def built(change: Any) -> Tiny:
    """Tiny with some of its methods changed, or what a function makes of it, or another class."""
    if isinstance(change, type):
        return change()
    if isinstance(change, dict):
        return type("Changed", (Tiny,), change)()
    model = Tiny()
    change(model)
    return model


def own_loss(model: Tiny) -> None:
    """The loss is a module of the model."""
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    forward = with_loss_of(
        lambda self, logits, labels: self.criterion(logits.flatten(0, 1), labels.flatten())
    )
    model.__class__ = type("OwnLoss", (Tiny,), {"loss_function": None, "forward": forward})
    model.criterion = criterion


def weighted(model: Tiny) -> None:
    forward = with_loss_of(
        lambda self, logits, labels: F.cross_entropy(
            logits.view(-1, VOCABULARY), labels.view(-1), self.weights
        )
    )
    model.__class__ = type("Weighted", (Tiny,), {"forward": forward})
    model.register_buffer("weights", torch.rand(VOCABULARY))


BY_ITSELF = with_loss_of(lambda self, logits, labels: causal_loss(logits, labels, VOCABULARY))
COUNTING = {
    "transformers": {},
    "no count": {"loss_function": staticmethod(without_a_count)},
    "no index": {"loss_function": staticmethod(without_an_index)},
    "low precision": {"loss_function": staticmethod(in_low_precision)},
    "bound": {"loss_function": lambda self, *args, **kwargs: causal_loss(*args, **kwargs)},
}
FOUND: dict[str, Any] = {
    **COUNTING,
    "unshifted": {"loss_function": staticmethod(unshifted)},
    "smoothed": {"loss_function": staticmethod(smoothed)},
    # The loss is computed from other logits than the returned ones.
    "doubled": {"result": lambda self, value, logits: Tiny.result(self, value, 2 * logits)},
    "by itself": {"forward": BY_ITSELF},
    "own loss": own_loss,
}


@pytest.mark.parametrize("name", FOUND)
def test_any_model_that_computes_it(name: str) -> None:
    model = built(FOUND[name])
    fused = with_fused_loss(model)
    ways: list[dict[str, Any]] = [{}]
    if name in COUNTING:
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


def of_result(more: Callable[[Tensor], dict[str, Any]]) -> dict[str, Any]:
    """The result has more values, of the logits."""
    result = lambda self, value, logits: {**Tiny.result(self, value, logits), **more(logits)}
    return {"result": result}


def of_logits(logits: Callable[[Tiny, Tensor], Tensor]) -> dict[str, Any]:
    return {"logits": logits}


penalty = lambda self, value, logits: Tiny.result(self, value + logits.pow(2).sum() / 100, logits)
NEAR_MISSES: dict[str, tuple[Any, str]] = {
    "penalised": ({"result": penalty}, "its forward applies pow to its logits"),
    "log normaliser": (
        of_result(lambda logits: {"lse": logits.logsumexp(-1)}),
        "its forward applies logsumexp to its logits",
    ),
    "best": (
        of_result(lambda logits: {"best": logits.argmax(-1)}),
        "its forward applies argmax to its logits",
    ),
    "clamped": (of_logits(lambda self, x: self.head(x).clamp(-50, 50)), "forward applies clamp to"),
    "shifted": (of_logits(lambda self, x: self.head(x) + 0.5), "forward applies add to its logits"),
    "negative": (of_logits(lambda self, x: -self.head(x)), "forward applies neg to its logits"),
    "subnormal": (of_logits(lambda self, x: self.head(x) / 1e-42), "applies div to its logits"),
    "normalised": (
        of_logits(lambda self, x: self.head(x).log_softmax(-1)),
        "its forward applies log_softmax to its logits",
    ),
    "detached": (of_logits(lambda self, x: self.head(x).detach()), "forward applies detach to its"),
    "half detached": (of_logits(half_detached), "its forward applies detach to its logits"),
    "one less": (
        of_logits(lambda self, x: self.head(x)[:, :-1]),
        "with a stub for the body (ValueError: there are not as many labels as logits)",
    ),
    "twice": (of_logits(lambda self, x: self.head(x) + self.head(x)), "its forward applies add to"),
    "weighted": (
        weighted,
        "its forward applies cross_entropy to its logits, with its buffer weights",
    ),
    "without head": (
        {"forward": BY_ITSELF, "logits": lambda self, x: F.linear(x, self.head.weight)},
        "its forward computes no cross_entropy of its head's output",
    ),
    "nested": (
        {"result": lambda self, value, logits: {"loss": value, "all": [logits]}},
        "its forward returns its logits within another value",
    ),
    "not linear": (
        lambda model: setattr(model, "head", nn.Sequential(nn.Linear(8, VOCABULARY), nn.Tanh())),
        "its head is a torch.nn.modules.container.Sequential, not a torch.nn.Linear",
    ),
    "deeper": (Deeper, "its head is in a ModuleList, not a child of it"),
    "masked": (LogitsMasked, "with attention_mask, its forward applies mul to its logits"),
    "own skip": (OwnSkip, "its forward has a skip_logits of its own"),
    "object": (
        {"result": lambda self, value, logits: copy.copy(nn.Identity())},
        "its forward returns a Identity, neither a tuple nor a dict",
    ),
    "own forward": (
        lambda model: setattr(model, "forward", model.forward),
        "the instance has a forward of its own",
    ),
    "own logits": (
        lambda model: setattr(model, "logits", model.head.forward),
        "the instance has a logits of its own",
    ),
}


@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_miss_is_left_with_the_reason(change: Any, reason: str) -> None:
    model = built(change)
    cls = type(model)
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
