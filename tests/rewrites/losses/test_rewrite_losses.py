"""cross_entropy and linear_cross_entropy, found in the code of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loss_spellings import D, Loss, V, head_inputs, inputs, plain, sliced, transformers, with_head
from rewriting import check, each_dtype


def sliced_otherwise(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits[:, :-1].float()
    return F.cross_entropy(shifted.flatten(0, 1), target[:, 1:].reshape(-1))


def of_the_last_positions(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, -3:].reshape(-1, V), target[:, -3:].flatten())


def narrowed(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits.narrow(1, 0, logits.shape[1] - 1)
    return F.cross_entropy(shifted.reshape(-1, V), target[:, 1:].flatten())


def per_item(logits: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(logits.float().view(-1, V), target.view(-1), reduction="sum")
    return total / 7


CHAINS: dict[str, Loss] = {
    "plain": plain,
    "transformers": transformers,
    "sliced": sliced,
    "sliced-otherwise": sliced_otherwise,
    "narrowed": narrowed,
    "last-positions": of_the_last_positions,
    "sum-per-item": per_item,
    "module": lambda logits, target: nn.CrossEntropyLoss()(logits.flatten(0, 1), target.flatten()),
}


@pytest.mark.quick(rewrites=("cross_entropy",))
@each_dtype
@pytest.mark.parametrize("loss", CHAINS.values(), ids=CHAINS)
def test_cross_entropy(loss, dtype):
    (call,) = check(loss, *inputs(dtype), counts={"cross_entropy": 1}).calls("cross_entropy")
    assert (call["ignore_index"], call["label_smoothing"]) == (-100, 0.0)
    assert (call["softcap"], call["logit_scale"]) == (None, 1.0)
    # The logits are not widened in memory.
    assert call["logits"].meta["example_value"].dtype == dtype


@pytest.mark.quick(rewrites=("linear_cross_entropy",))
@each_dtype
@pytest.mark.parametrize("loss", CHAINS.values(), ids=CHAINS)
def test_linear_cross_entropy(loss, dtype):
    found = check(with_head(loss), *head_inputs(dtype), counts={"linear_cross_entropy": 1})
    (call,) = found.calls("linear_cross_entropy")
    assert (call["ignore_index"], call["label_smoothing"]) == (-100, 0.0)
    assert (call["softcap"], call["logit_scale"], call["bias"]) == (None, 1.0, None)
    # No tensor of the size of the logits is in the graph.
    made = [node.meta.get("example_value") for node in found.nodes() if node.op != "placeholder"]
    assert not [one for one in made if isinstance(one, Tensor) and V in one.shape]


@each_dtype
@pytest.mark.parametrize(
    "head",
    (
        lambda x, weight: x @ weight.t(),
        lambda x, weight: x @ weight.T,
        lambda x, weight: torch.matmul(x, weight.transpose(0, 1)),
    ),
    ids=("t", "T", "transpose"),
)
def test_heads_that_are_written_as_products(head, dtype):
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return transformers(head(x, weight), target)

    check(function, *head_inputs(dtype), counts={"linear_cross_entropy": 1})


def test_losses_in_float16():
    check(transformers, *inputs(torch.float16), counts={"cross_entropy": 1})
    counts = {"linear_cross_entropy": 1}
    check(with_head(transformers), *head_inputs(torch.float16), counts=counts)


@each_dtype
def test_linear_cross_entropy_of_modules(dtype):
    class Model(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.head = nn.Linear(D, V, bias=bias)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return transformers(self.head(x), target)

    torch.manual_seed(0)
    x, _, target = head_inputs(dtype)
    for bias in (False, True):
        model = Model(bias).to(dtype)
        found = check(model, x, target, counts={"linear_cross_entropy": 1})
        (call,) = found.calls("linear_cross_entropy")
        assert (call["bias"] is not None) == bias


OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "label_smoothing": {"label_smoothing": 0.1},
    "all": {"reduction": "sum", "ignore_index": 1, "label_smoothing": 0.25},
}


@each_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_options(head, options, dtype):
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, V), target.view(-1), **options)

    op = "linear_cross_entropy" if head else "cross_entropy"
    function, arguments = (with_head(loss), head_inputs) if head else (loss, inputs)
    *rest, target = arguments(dtype)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    (call,) = check(function, *rest, target, counts={op: 1}).calls(op)
    assert {name: call[name] for name in options} == options


@each_dtype
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_a_weight_of_each_class(head, dtype):
    class_weight = torch.linspace(0.5, 2.0, V)

    def loss(logits: Tensor, target: Tensor, class_weight: Tensor) -> Tensor:
        rows = logits.float().view(-1, V)
        return F.cross_entropy(rows, target.view(-1), class_weight.to(rows.dtype))

    if head:
        function = lambda x, weight, target, w: loss(F.linear(x, weight), target, w)
        check(function, *head_inputs(dtype), class_weight, counts={"linear_cross_entropy": 1})
    else:
        check(loss, *inputs(dtype), class_weight, counts={"cross_entropy": 1})


# What the code does to the logits, and the softcap and scale of the op.
SCALES: dict[str, tuple[Callable[[Tensor], Tensor], float | None, float]] = {
    "gemma2": (lambda logits: torch.tanh(logits / 30.0) * 30.0, 30.0, 1.0),
    "gemma2-in-place-of-names": (lambda logits: 2.0 * (logits / 2.0).tanh(), 2.0, 1.0),
    "granite": (lambda logits: logits / 8.0, None, 0.125),
    "cohere": (lambda logits: logits * 0.0625, None, 0.0625),
    "commuted": (lambda logits: 0.25 * logits, None, 0.25),
    "twice": (lambda logits: logits * 0.5 / 4.0, None, 0.125),
    "scaled-then-capped": (lambda logits: torch.tanh(logits * 0.5 / 3.0) * 3.0, 3.0, 0.5),
    "module": (lambda logits: nn.Tanh()(logits / 5.0).mul(5.0), 5.0, 1.0),
}


@each_dtype
@pytest.mark.parametrize(("scaled", "softcap", "scale"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_scales_and_softcaps(head, scaled, softcap, scale, dtype):
    loss = lambda logits, target: transformers(scaled(logits), target)
    op = "linear_cross_entropy" if head else "cross_entropy"
    function, arguments = (with_head(loss), head_inputs) if head else (loss, inputs)
    (call,) = check(function, *arguments(dtype), counts={op: 1}).calls(op)
    assert call["softcap"] == softcap
    assert call["logit_scale"] == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("loss", [plain, transformers, sliced], ids=["plain", "hf", "sliced"])
def test_losses_of_any_length(loss):
    for function, arguments, op in (
        (loss, inputs, "cross_entropy"),
        (with_head(loss), head_inputs, "linear_cross_entropy"),
    ):
        then = arguments(rows=3, length=7)
        check(function, *arguments(), then=then, counts={op: 1}, dynamic=True)


def test_two_heads():
    """Multi-token prediction: each head has its own loss."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return plain(F.linear(x, weight), target) + sliced(F.linear(x * 2, weight), target)

    check(function, *head_inputs(), counts={"linear_cross_entropy": 2})
