"""linear_score_centering's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import liger_ops
import op_checks
from head_bounds import (
    assert_gradients_match,
    assert_no_further,
    drawn,
    gradient_bounds,
    head_fields,
    logits_of,
    rounding,
    run,
    truth_args,
)
from liger_ops import library
from liger_ops.ops.heads.linear_score_centering import Tokens, targets_of
from liger_ops.ops.losses.score_centering import WEIGHTS
from linear_score_centering_cases import CenteringCase
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, EVERY_IMPLEMENTATION, NAN, Tensors

OP = OPS["linear_score_centering_forward-mean"]
NAMES = ("forward", "backward")
FORWARD, BACKWARD = (library.OPS[f"linear_score_centering_{name}"] for name in NAMES)
LOG_PROB = library.OPS["linear_log_prob_forward"]
EXAMPLES = tuple(
    CenteringCase(shape=(9,), dtype=dtype, temperature=0.7, K=5, num_items=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
KINDS = pytest.mark.parametrize("kind", WEIGHTS)


@st.composite
def cases(draw: st.DrawFn) -> CenteringCase:
    fields = head_fields(
        draw, 3, K=(3, 1, 8, 20, 0), importance_sampling=tuple(WEIGHTS),
        reduction=("mean", "sum", "none"), num_items=(False, True),
    )  # fmt: skip
    fields["num_items"] &= fields["reduction"] == "mean"
    return CenteringCase(**fields)


def targets(tensors: Tensors) -> Tensor:
    names = ("target", "words", "sampling_top_log_prob")
    return targets_of(*(tensors[name] for name in names), -100)[0].long()


def true_gradients(
    case: CenteringCase, tensors: Tensors, dlog_prob: Tensor, dlse: Tensor | None = None
) -> list[Tensor | None]:
    """Those of log_prob and lse, in float64."""
    wide = {name: op_checks.in_float64(tensors[name]) for name in OP.gradients_of}
    leaves = {n: x.clone().requires_grad_() for n, x in wide.items() if x is not None}
    x, weight, bias, lora_x, lora_b = (leaves.get(name) for name in OP.gradients_of)
    options = (case.temperature, case.softcap, case.logit_scale)
    results = LOG_PROB.definition(
        x, weight, targets(tensors), bias, *options, lora_x=lora_x, lora_b=lora_b
    )
    total = (results[0] * dlog_prob.double()).sum()
    total = total + sum(leaf.sum() * 0 for leaf in leaves.values())
    if dlse is not None:
        total = total + (results[2] * dlse.double()).sum()
    found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    return [found.get(name) for name in OP.gradients_of]


def gradient_roundings(
    case: CenteringCase, tensors: Tensors, dlog_prob: Tensor, dlse: Tensor | None = None
) -> dict[str, float]:
    """Bound the change of each gradient by rounding the logits and their gradient to x's dtype, and
    the sum of x's gradient if it is in that dtype."""
    logits, words = logits_of(case, tensors), targets(tensors)
    counts = words != -100
    of_words = torch.where(counts, dlog_prob.double().abs(), 0.0)
    at_words = (of_words.unsqueeze(-1) * F.one_hot(words.clamp(min=0), case.V)).sum(-2)
    of_lse = of_words.sum(-1) if dlse is None else of_words.sum(-1) + dlse.double().abs()
    terms = at_words + of_lse.unsqueeze(-1) * logits.softmax(-1)
    terms = terms * counts.any(-1, keepdim=True) * case.logit_scale / case.temperature
    terms = terms.reshape(-1, case.V)
    bounds = (2 * torch.finfo(case.dtype).eps + 4 * rounding(case, logits)) * terms
    return gradient_bounds(case, tensors, bounds, terms)


@drawn(cases(), *EXAMPLES)
def test_forward_matches_truth(folder: str, case: CenteringCase) -> None:
    """The loss and the gradients are those of the log-probabilities that the op returns, whose
    coefficients may be steep."""
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    loss, log_prob, lse, coefficients, total, error, *computed = run(OP, folder, False, args)
    references = FORWARD.definition(*OP.forward_args(replace(case, chunk_bytes=None), tensors))
    truths = FORWARD.definition(*truth_args(OP, case, tensors, False))
    bound = 2 * rounding(case, logits_of(case, tensors))
    for i, output in ((1, log_prob), (2, lse)):
        assert_no_further(f"{folder} {case}", output, references[i], truths[i], bound)
    assert bool((error.abs() <= torch.finfo(torch.float32).eps * lse.abs()).all())
    assert total == (tensors["target"] != -100).sum()
    sampled = Tokens.of_call(FORWARD.arguments(*args)).sampled
    expected = sampled.coefficients(log_prob.view(-1, case.K + 1)).view_as(log_prob)
    torch.testing.assert_close(coefficients, expected)
    terms = coefficients.double() * log_prob.double()
    losses, sizes = terms.sum(-1), terms.abs().sum(-1)
    if case.reduction != "none":
        items = divisor(case, tensors, total)
        losses, sizes = losses.sum() / items, sizes.sum() / items
    assert loss.shape == losses.shape and torch.equal(loss.isnan(), losses.isnan())
    bound = 4 * torch.finfo(torch.float32).eps * sizes
    assert not bool(((loss - losses).abs() > bound).any())
    of_words = (case, tensors, coefficients)
    gradients, bounds = true_gradients(*of_words), gradient_roundings(*of_words)
    for name, wanted, output, reference, truth in zip(
        OP.gradients_of, case.mask, computed, references[-5:], gradients, strict=True
    ):
        assert (output is not None) == (wanted and case.reduction != "none")
        if output is not None:
            label = f"{folder} d{name} of {case}"
            at_least = bounds[name] + torch.finfo(case.dtype).tiny
            assert_no_further(label, output, reference, truth, at_least)


def divisor(case: CenteringCase, tensors: Tensors, total: Tensor) -> Any:
    if case.reduction != "mean":
        return 1
    return tensors["num_items_in_batch"] if case.num_items else total.double()


@drawn(cases(), *EXAMPLES)
def test_backward_matches_truth(folder: str, case: CenteringCase) -> None:
    tensors = OP.tensors(case)
    dloss, given, dlse = (tensors[name] for name in ("dloss", "dlog_prob", "dlse"))
    dlog_prob = torch.zeros_like(tensors["coefficients"]).double()
    if dloss is not None:
        of_tokens = dloss.double() / divisor(case, tensors, tensors["total_weight"])
        # Without a kept token it is NaN, and every coefficient 0.
        dlog_prob += (of_tokens.unsqueeze(-1) * tensors["coefficients"]).nan_to_num()
    if given is not None:
        dlog_prob += given
    of_words = (case, tensors, dlog_prob, dlse)
    truths, bounds = true_gradients(*of_words), gradient_roundings(*of_words)
    assert_gradients_match(OP, folder, case, tensors, truths, bounds)


def composition(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of each token from linear_log_prob, and the log-probabilities."""
    names = ("x", "weight", "bias", "temperature", "softcap", "logit_scale")
    head = {name: given[name] for name in names}
    head |= {name: value for name, value in given.items() if name.startswith("lora")}
    log_prob, _ = liger_ops.linear_log_prob(target=targets(given), **head)
    tokens = Tokens.of_call(FORWARD.arguments(**{n: given[n] for n in SIGNATURE if n in given}))
    coefficients = tokens.sampled.coefficients(log_prob.view(-1, log_prob.shape[-1]))
    return (coefficients.view_as(log_prob) * log_prob).sum(-1), log_prob


SIGNATURE = FORWARD.arguments._fields


@KINDS
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_it_is_the_loss_of_linear_log_prob(kind: str, reduction: str) -> None:
    """Results, gradients, second derivatives and tangents, with a LoRA."""
    case = OP.sample(importance_sampling=kind, reduction=reduction, num_items=False)
    given = OP.public_arguments(case)
    a, b = torch.randn(3, case.D).double(), torch.randn(case.V, 3).double()
    leaves = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    leaves |= {"lora_a": a.requires_grad_(), "lora_b": b.requires_grad_()}
    given |= {"lora_scale": 0.7}
    kept = (given["target"] != -100).sum()

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(leaves, tensors, strict=True))
        return liger_ops.linear_score_centering(**{**given, **named})

    def theirs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        loss, log_prob = composition({**given, **dict(zip(leaves, tensors, strict=True))})
        if reduction == "none":
            return loss, log_prob
        return loss.sum() / (kept if reduction == "mean" else 1), log_prob

    tensors = tuple(leaves.values())
    tangents = tuple(torch.randn_like(x) for x in tensors)
    for parts in ((1.0, 0.0), (0.0, 1.0), (0.5, -2.0)):
        found = []
        for f in (ours, theirs):
            loss, log_prob = f(*tensors)
            total = parts[0] * loss.sin().sum()
            if parts[1]:
                total = total + parts[1] * log_prob.square().sum()
            first = torch.autograd.grad(total, tensors, create_graph=True)
            again = torch.autograd.grad(sum(x.square().sum() for x in first), tensors)
            found.append((loss, log_prob, *first, *again))
        torch.testing.assert_close(*found)
    detached = tuple(x.detach() for x in tensors)
    torch.testing.assert_close(*(torch.func.jvp(f, detached, tangents) for f in (ours, theirs)))


def test_three_products_and_a_second_backward() -> None:
    case = CenteringCase(shape=(6,), bias=False, chunk_bytes=None)
    given = OP.public_arguments(case)
    x, weight = given["x"], given["weight"]

    def products(run: Callable[[], Any]) -> float:
        with FlopCounterMode(display=False) as counted:
            run()
        return counted.get_total_flops() / (2 * 6 * case.V * case.D)

    def trained() -> None:
        torch.autograd.grad(liger_ops.linear_score_centering(**given)[0], (x, weight))

    assert products(trained) == 3
    loss, log_prob = liger_ops.linear_score_centering(**given)
    gradients = partial(torch.autograd.grad, inputs=(x, weight), retain_graph=True)
    first, second = gradients(loss), []
    # The gradient of weight was given away, and is computed again.
    assert products(lambda: second.extend(gradients(loss))) == 2
    torch.testing.assert_close(first, tuple(second))
    torch.testing.assert_close(first, gradients(loss + 0 * log_prob.sum()))
    with torch.no_grad():
        assert products(lambda: liger_ops.linear_score_centering(**given)) == 1


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_words_that_come_twice_are_left_out(implementation: str) -> None:
    """And one that is the sampled word too has the sum of both gradients."""
    function = FORWARD.kernels.get(implementation, FORWARD.definition)
    x, weight = (torch.randn(n, 4, device=DEVICE) for n in (2, 7))
    target = torch.tensor([3, 5], device=DEVICE)
    words = torch.tensor([[3, 1, 3, 1], [5, 2, -100, 6]], device=DEVICE)
    log_q = torch.full((2, 4), 0.2, device=DEVICE).log()
    log_q[1, 3] = -torch.inf
    advantages, mask = torch.ones(2, device=DEVICE), [True, True, False, False, False]
    found, shorter = (
        function(
            x, weight, target, words[:, :K], log_q[:, :K], advantages, gradient_mask=mask
        )  # fmt: skip
        for K in (4, 2)
    )
    for i in (0, 2, 4, 5, 6, 7):
        torch.testing.assert_close(found[i], shorter[i])
    assert not found[3][:, 3:].any() and not found[1][:, 3:].any()
    torch.testing.assert_close(found[1][:, 1], found[1][:, 0])


@EVERY_FOLDER
def test_words_out_of_range(folder: str) -> None:
    """Those that do not count are not read."""
    x, weight, target = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, -100])
    log_q, advantages = torch.full((2, 2), -1.0), torch.tensor([1.0, NAN])
    log_q[0, 1] = -torch.inf
    words = torch.tensor([[1, 77], [99, -7]])
    for function in (FORWARD.definition, FORWARD.kernels[folder]):
        assert function(x, weight, target, words, log_q, advantages)[0].isfinite()
    for wrong in (torch.tensor([[5, 0], [0, 0]]), torch.tensor([[-7, 0], [0, 0]])):
        with pytest.raises(IndexError):
            liger_ops.linear_score_centering(x, weight, target, wrong, log_q, advantages)
        results = FORWARD.kernels[folder](x, weight, target, wrong, log_q, advantages)
        assert results[0].isnan() and results[1].isnan().tolist()[0] == [False, True, False]
