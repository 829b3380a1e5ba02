"""linear_log_prob's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
import op_checks
from graphs import Recorder, liger_ops_of
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
from linear_log_prob_cases import LogProbHeadCase
from log_prob_cases import ASKED, UPSTREAM, K
from op_table import OPS
from op_under_test import Tensors

OP = OPS["linear_log_prob_forward"]
FORWARD, BACKWARD = (library.OPS[f"linear_log_prob_{name}"] for name in ("forward", "backward"))
EXAMPLES = tuple(
    LogProbHeadCase(shape=(9,), dtype=dtype, temperature=0.7, K=k)
    for k in (None, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)


@st.composite
def cases(draw: st.DrawFn) -> LogProbHeadCase:
    return LogProbHeadCase(**head_fields(draw, 3, K=K))


@drawn(cases(), *EXAMPLES)
def test_forward_matches_truth(folder: str, case: LogProbHeadCase) -> None:
    tensors = OP.tensors(case)
    args = OP.forward_args(replace(case, **dict.fromkeys(ASKED, True)), tensors)
    outputs = run(OP, folder, False, args)
    references = FORWARD.definition(*args)
    *truths, _, _ = FORWARD.definition(*op_checks.widened(args))
    # Logits in x's dtype are equal where float64's are not.
    *outputs, predicted, lse_error = outputs
    *references, expected, _ = references
    assert torch.equal(predicted, expected)
    # At most half of the distance of lse to the next number.
    assert bool((lse_error.abs() <= torch.finfo(torch.float32).eps * outputs[2].abs()).all())
    error = 2 * rounding(case, logits_of(case, tensors))
    bounds = (error, error * (1 + math.log(case.V)), error, error, 2 * error)
    for output, reference, truth, bound in zip(outputs, references, truths, bounds, strict=True):
        assert_no_further(f"{folder} {case}", output, reference, truth, bound)


@drawn(cases(), *EXAMPLES)
def test_backward_matches_truth(folder: str, case: LogProbHeadCase) -> None:
    tensors = OP.tensors(case)
    truths = op_checks.true_gradients(OP, case, tensors)
    bounds = gradient_roundings(case, tensors)
    assert_gradients_match(OP, folder, case, tensors, truths, bounds)


def gradient_roundings(case: LogProbHeadCase, tensors: Tensors) -> dict[str, float]:
    """Bound the change of each gradient by rounding the logits and their gradient to x's dtype, and
    the sum of x's gradient if it is in that dtype."""
    logits = logits_of(case, tensors)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    kept = (tensors["target"] != -100).double().unsqueeze(-1)
    log_prob, dentropy, dlse = (
        torch.zeros(()) if tensors[name] is None else tensors[name].double().abs().unsqueeze(-1)
        for name in UPSTREAM
    )
    target = tensors["target"].clamp(min=0).long()
    if case.K is None:
        at_target = log_prob * F.one_hot(target, case.V)
    else:
        kept = kept.amax(-2)
        at_target = (log_prob * F.one_hot(target, case.V)).sum(-2)
        log_prob = log_prob.sum(-2) if log_prob.dim() else log_prob
    terms = at_target + (log_prob + dlse) * p
    terms = terms + dentropy * p * (1 + (log_p + entropy).abs())
    terms = kept * terms * case.logit_scale / case.temperature
    terms = terms.reshape(-1, case.V)
    bounds = (2 * torch.finfo(case.dtype).eps + 4 * rounding(case, logits)) * terms
    return gradient_bounds(case, tensors, bounds, terms)


def test_the_parts_are_those_of_log_prob() -> None:
    """Gradients in each result and in both, by the composed op, against the logits whole."""
    case = OP.sample()
    args = OP.forward_args(case, OP.tensors(case))[:10]
    leaves = [arg.requires_grad_() for i, arg in enumerate(args[:4]) if i != 2]
    x, weight, target, bias, *options = args
    ours = liger_ops.linear_log_prob(*args)
    theirs = liger_ops.log_prob(F.linear(x, weight, bias), target, *options[:4])
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        sums = [
            weights[0] * log_prob.sin().sum() + weights[1] * entropy.square().sum()
            for log_prob, entropy in (ours, theirs)
        ]
        grads = [torch.autograd.grad(total, leaves, retain_graph=True) for total in sums]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    alone = torch.autograd.grad(ours[1].sum(), leaves, retain_graph=True)
    assert all(gradient.abs().max() > 0 for gradient in alone)


def test_selecting_the_tokens_of_a_mask() -> None:
    """A mask may select tokens, as the documentation advises, to save products of ignored tokens:
    same results and gradients, one graph for every number of tokens, 0 among them."""
    recorder = Recorder()

    def selected(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        counts = target != -100
        values = torch.ops.liger.linear_log_prob(x[counts], weight, target[counts], chunk_bytes=60)
        return tuple(v.new_zeros(counts.shape).masked_scatter(counts, v) for v in values)

    torch._dynamo.reset()
    compiled = torch.compile(selected, fullgraph=True, dynamic=True, backend=recorder.backend())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for tokens, step in ((4, 2), (6, 3), (5, 1)):
            x, weight = (torch.randn(n, 5, requires_grad=True) for n in (tokens, 7))
            target = torch.arange(tokens)
            target[::step] = -100
            ways = (compiled, selected, liger_ops.linear_log_prob)
            results = [way(x, weight, target) for way in ways]
            found = [
                (*values, *torch.autograd.grad((values[0].exp() * values[1]).sum(), (x, weight)))
                for values in results
            ]
            for values in zip(*found, strict=True):
                for value in values[:2]:
                    torch.testing.assert_close(value, values[2])
    assert liger_ops_of(recorder.forwards) == {"linear_log_prob_forward": 1}
