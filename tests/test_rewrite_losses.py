"""cross_entropy and linear_cross_entropy, found in the code of models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewriting import Rewriter, check, each_dtype, values

B, S, D, V = 2, 5, 8, 11

Loss = Callable[[Tensor, Tensor], Any]


def labels(rows: int = B, length: int = S) -> Tensor:
    """Every third of them ignored."""
    target = torch.arange(rows * length) % V
    target[::3] = -100
    return target.view(rows, length)


def inputs(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Logits and labels."""
    return [values(rows, length, V, dtype=dtype), labels(rows, length)]


def head_inputs(dtype: torch.dtype = torch.float32, rows: int = B, length: int = S) -> list[Tensor]:
    """Hidden states, the head's weight, and labels."""
    x, weight = values(rows, length, D, dtype=dtype), values(V, D, dtype=dtype)
    return [x, weight, labels(rows, length)]


def with_head(loss: Loss) -> Callable[..., Any]:
    return lambda x, weight, target: loss(F.linear(x, weight), target)


def plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), target.view(-1))


def transformers(logits: Tensor, target: Tensor) -> Tensor:
    """ForCausalLMLoss: labels are shifted, logits are not."""
    logits = logits.float()
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, logits.shape[-1])
    return F.cross_entropy(logits, shifted.view(-1), ignore_index=-100, reduction="mean")


def sliced(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, V), target[..., 1:].contiguous().view(-1))


def sliced_otherwise(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits[:, :-1].float()
    return F.cross_entropy(shifted.flatten(0, 1), target[:, 1:].reshape(-1))


def of_the_last_positions(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, -3:].reshape(-1, V), target[:, -3:].flatten())


def per_item(logits: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(logits.float().view(-1, V), target.view(-1), reduction="sum")
    return total / 7


def module(logits: Tensor, target: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), target.flatten())


CHAINS: dict[str, Loss] = {
    "plain": plain,
    "transformers": transformers,
    "sliced": sliced,
    "sliced-otherwise": sliced_otherwise,
    "last-positions": of_the_last_positions,
    "sum-per-item": per_item,
    "module": module,
}


@each_dtype
@pytest.mark.parametrize("loss", CHAINS.values(), ids=CHAINS)
def test_cross_entropy(loss, dtype):
    (call,) = check(loss, *inputs(dtype), counts={"cross_entropy": 1}).calls("cross_entropy")
    assert (call["ignore_index"], call["label_smoothing"]) == (-100, 0.0)
    assert (call["softcap"], call["logit_scale"]) == (None, 1.0)
    # The logits are not widened in memory.
    assert call["logits"].meta["example_value"].dtype == dtype


@each_dtype
@pytest.mark.parametrize("loss", CHAINS.values(), ids=CHAINS)
def test_linear_cross_entropy(loss, dtype):
    found = check(with_head(loss), *head_inputs(dtype), counts={"linear_cross_entropy": 1})
    (call,) = found.calls("linear_cross_entropy")
    assert (call["ignore_index"], call["label_smoothing"]) == (-100, 0.0)
    assert (call["softcap"], call["logit_scale"], call["bias"]) == (None, 1.0, None)
    # Nothing of the size of the logits is left.
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


def test_a_product_with_what_is_not_turned_is_no_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return transformers(x @ weight, target)

    x, weight, target = head_inputs()
    check(function, x, weight.t().contiguous(), target, counts={"cross_entropy": 1})


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


# What is done to the logits, and the softcap and scale that it is.
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


# The logits are needed


def and_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight)
    return transformers(logits, target), logits


def and_wide_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight).float()
    return plain(logits, target), logits


def and_prediction(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(x, weight)
    return transformers(logits, target), logits.argmax(-1)


def and_capped_logits(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = torch.tanh(F.linear(x, weight) / 30.0) * 30.0
    return transformers(logits, target), logits


def two_losses(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return transformers(logits, target) + torch.logsumexp(logits, -1).square().mean()


USED_ELSEWHERE = {
    "returned": (and_logits, "the logits are returned"),
    "returned-wide": (and_wide_logits, "the logits are returned"),
    "returned-capped": (and_capped_logits, "the logits are returned"),
    "argmax": (and_prediction, "the logits are used by argmax too"),
    "z-loss": (two_losses, "used by logsumexp too"),
}


@each_dtype
@pytest.mark.parametrize(("function", "reason"), USED_ELSEWHERE.values(), ids=USED_ELSEWHERE)
def test_logits_that_are_needed(function, reason, dtype):
    """Their loss is cross_entropy's, and the head stays."""
    found = check(function, *head_inputs(dtype), counts={"cross_entropy": 1})
    (given,) = found.reasons("linear_cross_entropy")
    assert reason in given


def test_two_losses_of_the_same_logits():
    function = with_head(lambda logits, target: plain(logits, target) + sliced(logits, target))
    found = check(function, *head_inputs(), counts={"cross_entropy": 2})
    assert len(found.reasons("linear_cross_entropy")) == 2


def test_two_heads():
    """Multi-token prediction: each head has its loss."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return plain(F.linear(x, weight), target) + sliced(F.linear(x * 2, weight), target)

    check(function, *head_inputs(), counts={"linear_cross_entropy": 2})


# What the ops have not


def probabilities(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.view(-1, V)
    return F.cross_entropy(rows, F.softmax(rows.detach() * target.view(-1, 1), -1))


def by_channels(logits: Tensor, target: Tensor) -> Tensor:
    """(B, V, S), as PyTorch has it for images."""
    return F.cross_entropy(logits.transpose(1, 2), target)


def one_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[0, 1], target[0, 1])


def by_nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, V), -1), target.view(-1))


REFUSED: dict[str, tuple[Loss, str]] = {
    "probabilities": (probabilities, "not rows, of one target each"),
    "by-channels": (by_channels, "not rows, of one target each"),
    "one-row": (one_row, "not rows, of one target each"),
}


@pytest.mark.parametrize(("loss", "reason"), REFUSED.values(), ids=REFUSED)
def test_losses_that_are_refused(loss, reason):
    found = check(loss, *inputs(), counts={})
    assert len(found.reasons("cross_entropy")) == 1
    assert reason in found.reasons("cross_entropy")[0]
    check(with_head(loss), *head_inputs(), counts={})


def test_losses_that_are_no_cross_entropy():
    found = check(by_nll, *inputs(), counts={})
    assert found.findings == []


def written_logits(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits * 1.0
    rows = logits.view(-1, V)
    logits.mul_(2)
    return F.cross_entropy(rows, target.view(-1))


def masked_logits(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.float() * 1.0
    wide = torch.tanh(logits / 3.0) * 3.0
    logits[:, 0] = 0.0
    return plain(wide, target) + logits.sum()


def test_written_logits():
    logits, target = inputs()
    found = check(masked_logits, logits.detach(), target, counts={})
    assert "written in place" in found.reasons("cross_entropy")[0]
    # A view of what is written has what was written.
    assert_right_without_head(written_logits)


def test_a_written_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        weight = weight * 1.0
        logits = F.linear(x, weight)
        weight.mul_(2)
        return plain(logits, target), weight

    x, weight, target = head_inputs()
    found = check(function, x.detach(), weight.detach(), target, counts={"cross_entropy": 1})
    assert "written in place" in found.reasons("linear_cross_entropy")[0]


def test_written_labels():
    """Before the head and after the loss."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        target = target.clone()
        target[:, 0] = -100
        loss = plain(F.linear(x, weight), target)
        target[:, 1] = -100
        return loss, target

    x, weight, target = head_inputs()
    counts = {"linear_cross_entropy": 1}
    check(function, x.detach(), weight.detach(), target, counts=counts)


def test_labels_written_after_the_head():
    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        target = target.clone()
        target[:, 0] = -100
        return plain(logits, target)

    found = check(function, *head_inputs(), counts={"cross_entropy": 1})
    assert "written in place" in found.reasons("linear_cross_entropy")[0]


def assert_right_without_head(loss: Loss) -> Rewriter:
    logits, target = inputs()
    torch._dynamo.reset()
    found = Rewriter()
    compiled = torch.compile(loss, backend=found, fullgraph=True)
    torch.testing.assert_close(
        compiled(logits.detach().clone(), target), loss(logits.detach().clone(), target)
    )
    return found


# Chains that are broken: the loss is an op of what comes after the break


def capped_then_scaled(logits: Tensor, target: Tensor) -> Tensor:
    """Of the op the cap comes last: here it is another function."""
    return transformers(torch.tanh(logits / 3.0) * 3.0 * 0.5, target)


def capped_twice(logits: Tensor, target: Tensor) -> Tensor:
    capped = torch.tanh(logits / 3.0) * 3.0
    return transformers(torch.tanh(capped / 2.0) * 2.0, target)


def of_two_caps(logits: Tensor, target: Tensor) -> Tensor:
    return transformers(torch.tanh(logits / 3.0) * 4.0, target)


def negated(logits: Tensor, target: Tensor) -> Tensor:
    return transformers(logits * -1.0, target)


def scaled_by_tensor(logits: Tensor, target: Tensor) -> Tensor:
    return transformers(logits * logits.detach().abs().mean(), target)


def rounded(logits: Tensor, target: Tensor) -> Tensor:
    return transformers(logits.to(torch.bfloat16), target)


def mixed(logits: Tensor, target: Tensor) -> Tensor:
    """A view that mixes the vocabulary with the positions."""
    rows = logits.transpose(1, 2).reshape(-1, V)
    return F.cross_entropy(rows, target.view(-1))


def regrouped(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(B, V, S).contiguous().view(-1, V), target.view(-1))


def of_some_classes(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :7].reshape(-1, 7), target.view(-1).clamp(max=6))


def of_one_chunk(logits: Tensor, target: Tensor) -> Tensor:
    first, _ = logits.split([7, 4], dim=-1)
    return F.cross_entropy(first.reshape(-1, 7), target.view(-1).clamp(max=6))


def of_a_chunk_of_positions(logits: Tensor, target: Tensor) -> Tensor:
    first, _ = logits.split([3, 2], dim=1)
    return F.cross_entropy(first.reshape(-1, V), target[:, :3].reshape(-1))


def of_every_second_position(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, ::2].reshape(-1, V), target[:, ::2].reshape(-1))


def of_some_of_two_dimensions(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[1:, -3:].reshape(-1, V), target[1:, -3:].flatten())


def of_chosen_positions(logits: Tensor, target: Tensor) -> Tensor:
    chosen = torch.tensor([0, 3])
    return F.cross_entropy(logits[:, chosen].view(-1, V), target[:, chosen].view(-1))


def sliced_after_a_view(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V)[1:], target.view(-1)[1:])


def partly_without_gradient(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        logits = torch.tanh(logits / 3.0) * 3.0
    return transformers(logits, target)


BROKEN: dict[str, tuple[Loss, int]] = {
    "capped-then-scaled": (capped_then_scaled, 0),
    "capped-twice": (capped_twice, 0),
    "two-caps": (of_two_caps, 0),
    "negated": (negated, 0),
    "scaled-by-a-tensor": (scaled_by_tensor, 0),
    "rounded": (rounded, 0),
    "mixed": (mixed, 0),
    "regrouped": (regrouped, 0),
    "some-classes": (of_some_classes, 0),
    "one-chunk-of-classes": (of_one_chunk, 0),
    "one-chunk-of-positions": (of_a_chunk_of_positions, 0),
    "every-second-position": (of_every_second_position, 1),
    "chosen-positions": (of_chosen_positions, 0),
    "two-dimensions": (of_some_of_two_dimensions, 0),
    "sliced-after-a-view": (sliced_after_a_view, 0),
}


@pytest.mark.parametrize(("loss", "head"), BROKEN.values(), ids=BROKEN)
def test_chains_that_do_not_reach_the_head(loss, head):
    """What is done to the logits beside is done; the loss is cross_entropy's all the same."""
    found = check(loss, *inputs(), counts={"cross_entropy": 1})
    (call,) = found.calls("cross_entropy")
    assert call["softcap"] in (None, 2.0)
    counts = {"linear_cross_entropy": 1} if head else {"cross_entropy": 1}
    check(with_head(loss), *head_inputs(), counts=counts)


def test_logits_in_another_gradient_mode():
    found = check(partly_without_gradient, *inputs(), counts={})
    assert "modes" in found.reasons("cross_entropy")[0]


def test_logits_under_autocast():
    """Its head multiplies in bfloat16; the loss outside is of those logits."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(x, weight)
        return transformers(logits, target)

    rewriter = Rewriter()
    torch._dynamo.reset()
    arguments = [one.detach() for one in head_inputs()]
    loss = torch.compile(function, backend=rewriter, fullgraph=True)(*arguments)
    assert rewriter.counts() == {"cross_entropy": 1}
    assert "autocast" in rewriter.reasons("linear_cross_entropy")[0]
    # Log-sum-exp and one logit, in float32, of the same bfloat16 logits.
    exact = function(*arguments)
    assert math.isclose(loss, exact, rel_tol=1e-6)
