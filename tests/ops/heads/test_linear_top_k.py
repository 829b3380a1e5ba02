"""linear_top_k's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

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
)
from liger_ops import library
from linear_top_k_cases import TopKCase
from op_table import OPS
from op_under_test import DEVICE, EVERY_IMPLEMENTATION, INF, NAN, Tensors

OP = OPS["linear_top_k_forward"]
FORWARD = library.OPS["linear_top_k_forward"]
LOG_PROB = library.OPS["linear_log_prob_forward"]
EXAMPLES = tuple(
    TopKCase(shape=(9,), dtype=dtype, temperature=0.7, k=5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)


@st.composite
def cases(draw: st.DrawFn) -> TopKCase:
    fields = head_fields(draw, 2)
    return TopKCase(**fields, k=draw(st.integers(1, min(fields["V"], 20))))


def log_prob_args(case: TopKCase, tensors: Tensors, words: Tensor) -> tuple[Any, ...]:
    names = ("x", "weight", "bias", "lora_x", "lora_b")
    x, weight, bias, lora_x, lora_b = (tensors[name] for name in names)
    options = (case.temperature, case.softcap, case.logit_scale, -100, None, None)
    return x, weight, words, bias, *options, False, False, False, lora_x, lora_b


@drawn(cases(), *EXAMPLES)
def test_forward_matches_truth(folder: str, case: TopKCase) -> None:
    """The words have the largest of the logits in x's dtype, and log_prob is theirs."""
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    log_prob, lse, words, error = run(OP, folder, False, args)
    # A device's products may be summed in another order than those of the logits whole.
    logits = logits_of(case, tensors)
    bound = 2 * rounding(case, logits)
    best = logits.topk(case.k).values
    if logits.numel():
        assert (logits.gather(-1, words) - best).abs().max() <= bound + 1e-12
    assert bool((words.sort(-1).values.diff(dim=-1) > 0).all()), "a word comes twice"
    references = LOG_PROB.definition(*log_prob_args(case, tensors, words))
    truths = LOG_PROB.definition(*op_checks.widened(log_prob_args(case, tensors, words)))
    assert_no_further(f"{folder} {case}", log_prob, references[0], truths[0], bound)
    assert_no_further(f"{folder} {case}", lse, references[2], truths[2], bound)
    assert bool((error.abs() <= torch.finfo(torch.float32).eps * lse.abs()).all())


@drawn(cases(), *EXAMPLES)
def test_backward_matches_truth(folder: str, case: TopKCase) -> None:
    tensors = OP.tensors(case)
    wide = {name: op_checks.in_float64(value) for name, value in tensors.items()}
    leaves = {
        name: wide[name].clone().requires_grad_()
        for name in OP.gradients_of
        if wide[name] is not None
    }
    results = LOG_PROB.definition(*log_prob_args(case, {**wide, **leaves}, tensors["words"]))
    pairs = ((results[0], wide["dlog_prob"]), (results[2], wide["dlse"]))
    total = sum((result * grad).sum() for result, grad in pairs if grad is not None)
    found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    truths = [found.get(name) for name in OP.gradients_of]
    logits = logits_of(case, tensors)
    p = logits.softmax(-1)
    log_prob, dlse = (
        torch.zeros((), device=DEVICE) if tensors[name] is None else tensors[name].double().abs()
        for name in ("dlog_prob", "dlse")
    )
    of_words = (log_prob.unsqueeze(-1) * F.one_hot(tensors["words"], case.V)).sum(-2)
    upstream = (log_prob.sum(-1) if log_prob.dim() else log_prob) + dlse
    terms = (of_words + upstream.unsqueeze(-1) * p) * case.logit_scale / case.temperature
    terms = terms.reshape(-1, case.V)
    bounds = (2 * torch.finfo(case.dtype).eps + 4 * rounding(case, logits)) * terms
    assert_gradients_match(
        OP, folder, case, tensors, truths, gradient_bounds(case, tensors, bounds, terms)
    )


def test_it_is_linear_log_prob_of_its_words() -> None:
    case = OP.sample()
    given = OP.public_arguments(case)
    words, log_prob = liger_ops.linear_top_k(**given)
    k = given.pop("k")
    expected, _ = liger_ops.linear_log_prob(target=words, **given)
    assert words.shape[-1] == k
    torch.testing.assert_close(log_prob, expected)
    leaves = [x for x in given.values() if isinstance(x, Tensor)]
    grads = [torch.autograd.grad(y.sin().sum(), leaves) for y in (log_prob, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_order_and_undefined_logits(implementation: str) -> None:
    """Equal logits are in the order of their words. A row of NaN, or with inf, gives NaN, and a
    word of -inf has probability 0."""
    rows = torch.tensor(
        [[1.0, 2, 1, 2, 2, 0], [0, 1, -INF, -INF, -INF, -INF], [0, NAN, 1, 1, 1, 1],
         [INF, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3]],
        device=DEVICE,
    )  # fmt: skip
    # The logits are exactly the rows.
    args = (torch.eye(len(rows), device=DEVICE), rows.nan_to_num(0.0, 0.0, 0.0).t().contiguous())
    function = FORWARD.kernels.get(implementation, FORWARD.definition)
    log_prob, _, words, _ = function(*args, 5)
    assert words[0].tolist() == [1, 3, 4, 0, 2] and len(set(words[4].tolist())) == 5
    assert words[4].tolist() == sorted(words[4].tolist())
    torch.testing.assert_close(log_prob, rows.nan_to_num(0, 0, 0).log_softmax(-1).gather(1, words))
    zeros = torch.zeros(1, 1, device=DEVICE), torch.zeros(6, 1, device=DEVICE)
    for row, undefined in ((1, False), (2, True), (3, True)):
        log_prob, _, words, _ = function(*zeros, 3, rows[row])
        assert log_prob.isnan().all() if undefined else log_prob[0, 2] == -INF
    assert words[0, 0] == 0


def test_all_words() -> None:
    """With k = V, the log-probabilities are all of them: their probabilities sum to 1."""
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    words, log_prob = liger_ops.linear_top_k(x, weight, 11)
    assert torch.equal(words.sort(-1).values, torch.arange(11).expand(4, 11))
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(4, dtype=torch.float64))
