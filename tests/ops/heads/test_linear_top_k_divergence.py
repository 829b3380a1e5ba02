"""linear_top_k_divergence's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

import itertools
import math
import warnings
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
from linear_top_k_divergence_cases import UPSTREAM, TopKCase
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, EVERY_IMPLEMENTATION, INF, NAN, Tensors

OP = OPS["linear_top_k_divergence_forward"]
NAMES = ("forward", "backward")
FORWARD, BACKWARD = (library.OPS[f"linear_top_k_divergence_{name}"] for name in NAMES)
KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd")
ACCEPTED = {*itertools.product(KINDS, ("bucket", "zero", "drop"))} - {("reverse_kl", "zero")}


@st.composite
def cases(draw: st.DrawFn) -> TopKCase:
    fields = head_fields(draw, 2, K=(3, 1, 5, 2, 130))
    return TopKCase(**fields | {"K": min(fields["V"], fields["K"])})


@drawn(cases())
def test_forward_matches_truth(folder: str, case: TopKCase) -> None:
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    outputs = run(OP, folder, False, args)
    references = FORWARD.definition(*args)
    truths = FORWARD.definition(*op_checks.widened(args))
    error = 2 * rounding(case, logits_of(case, tensors))
    for output, reference, truth in zip(outputs, references, truths, strict=True):
        missing = truth == -INF
        assert torch.equal(output == -INF, missing)
        finite = [value.masked_fill(missing, 0.0) for value in (output, reference, truth)]
        assert_no_further(f"{folder} {case}", *finite, error)


@drawn(cases())
def test_backward_matches_truth(folder: str, case: TopKCase) -> None:
    tensors = OP.tensors(case)
    truths, bounds = true_gradients(case, tensors), gradient_roundings(case, tensors)
    assert_gradients_match(OP, folder, case, tensors, truths, bounds)


def true_gradients(case: TopKCase, tensors: Tensors) -> list[Tensor | None]:
    """By autograd, without the results that are -inf."""
    wide = {name: op_checks.in_float64(value) for name, value in tensors.items()}
    leaves = [wide[name] for name in OP.gradients_of]
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
    wide.update(zip(OP.gradients_of, leaves, strict=True))
    outputs = FORWARD.definition(*OP.forward_args(case, wide))
    total = sum(leaf.sum() * 0 for leaf in leaves if leaf is not None)
    for output, name in zip(outputs, UPSTREAM, strict=False):
        if wide[name] is not None:
            total = total + torch.where(output.isfinite(), output * wide[name], 0.0).sum()
    grads = iter(torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None]))
    return [None if leaf is None else next(grads) for leaf in leaves]


def gradient_roundings(case: TopKCase, tensors: Tensors) -> dict[str, float]:
    """Bound the change of each gradient by rounding the logits and their gradient to x's dtype, and
    the sum of x's gradient if it is in that dtype."""
    logits = logits_of(case, tensors).reshape(-1, case.V)
    ids = tensors["teacher_ids"].long().reshape(-1, case.K)
    columns = torch.where(ids < 0, case.V, ids)
    wide = F.pad(torch.zeros_like(logits), (0, 1))
    listed = wide.scatter(-1, columns, 1.0)[:, : case.V]
    p = logits.masked_fill(listed > 0, -INF).log_softmax(-1).exp().nan_to_num()
    p = p * (ids >= 0).any(-1, keepdim=True)
    dlogits, drest = (
        torch.zeros(shape, dtype=torch.double, device=p.device)
        if tensors[name] is None
        else tensors[name].double().abs().reshape(shape)
        for name, shape in zip(UPSTREAM, (ids.shape, (len(ids), 1)), strict=True)
    )
    terms = wide.scatter(-1, columns, dlogits)[:, : case.V] + drest * p
    terms = terms * case.logit_scale / case.temperature
    bounds = (2 * torch.finfo(case.dtype).eps + 4 * rounding(case, logits)) * terms
    return gradient_bounds(case, tensors, bounds, terms)


def teacher(tokens: int, V: int, K: int, dtype: torch.dtype = torch.double) -> tuple[Tensor, ...]:
    """Its words and their log-probabilities, those of the first token with entries left out, and
    its whole distribution."""
    log_p = torch.randn(tokens, V, dtype=dtype).log_softmax(-1)
    log_prob, ids = log_p.topk(K)
    ids[0, K // 2] = -1
    return ids, log_prob, log_p


def written(q: Tensor, p: Tensor, ids: Tensor, kind: str, beta: float, tail: str) -> Tensor:
    """The divergence of one token, from the probabilities of all words and the definition."""
    words = ids[ids >= 0]
    p, listed = p[ids >= 0], q[words]
    if tail == "bucket":
        p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([listed, 1 - listed.sum()[None]])
    elif tail == "zero":
        p = torch.zeros_like(q).index_put((words,), p / p.sum())
    else:
        p, q = p / p.sum(), listed / listed.sum()
    if kind == "tvd":
        return (p - q).abs().sum() / 2
    kl = lambda a, b: torch.xlogy(a, a).sum() - torch.xlogy(a, b).sum()
    if kind == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    return kl(p, q) if kind == "forward_kl" else kl(q, p)


@pytest.mark.parametrize(("kind", "tail"), sorted(ACCEPTED))
@pytest.mark.parametrize("softcap", (None, 2.0))
def test_the_divergence_of_the_classes(kind: str, tail: str, softcap: float | None) -> None:
    """Values and all gradients, the teacher's among them, against probabilities of all words."""
    ids, log_prob, _ = teacher(6, 11, 4)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.double).requires_grad_()
    x, weight, bias, log_prob = draw(6, 5), draw(11, 5), draw(11), log_prob.requires_grad_()
    leaves = (x, weight, bias, log_prob)
    options = (kind, 0.3, tail, 0.7, softcap, 0.8)
    ours = liger_ops.linear_top_k_divergence(
        x, weight, ids, log_prob, bias, None, *options, chunk_bytes=200
    )
    z = F.linear(x, weight, bias) * 0.8
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    q, p = (z / 0.7).softmax(-1), log_prob.exp()
    theirs = torch.stack([written(q[i], p[i], ids[i], kind, 0.3, tail) for i in range(6)])
    dy = torch.randn(6, dtype=torch.double)
    grads = [torch.autograd.grad(values, leaves, dy) for values in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_listed_is_the_whole_divergence(kind: str) -> None:
    """And fewer words give at most that."""
    x, weight = torch.randn(5, 4, dtype=torch.double), torch.randn(9, 4, dtype=torch.double)
    log_p = torch.randn(5, 9, dtype=torch.double).log_softmax(-1)
    whole = liger_ops.divergence(x @ weight.T, log_p, kind)
    for K in (9, 8, 3, 1):
        log_prob, ids = log_p.topk(K)
        found = liger_ops.linear_top_k_divergence(x, weight, ids, log_prob, kind=kind)
        assert bool((found <= whole + 1e-12).all())
        if K >= 8:
            torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("tail", ("bucket", "drop"))
def test_same_as_trl(beta: float, tail: str) -> None:
    """The sum of a chunk's divergences and its gradients, with entries that are left out."""
    pytest.importorskip("trl", reason="the function is TRL's")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_distillation import async_distillation_trainer as trl
    ids, log_prob, _ = teacher(7, 50, 5, torch.float32)
    x, weight = torch.randn(7, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    theirs, *_ = trl._jsd_loss_chunk(
        x, weight, None, 0.5, 3.0, ids, log_prob, ids >= 0, beta, 0.7, tail == "bucket", None, 1
    )
    options = ("jsd", beta, tail, 0.7, 3.0, 0.5)
    ours = liger_ops.linear_top_k_divergence(x, weight, ids, log_prob, None, None, *options).sum()
    grads = [torch.autograd.grad(value, (x, weight)) for value in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_a_small_tail_is_not_a_difference_from_one(implementation: str) -> None:
    """A student that leaves 1e-9 to other words, which 1 - sum(q) would round to 0."""
    weight = torch.zeros(50, 2, device=DEVICE)
    weight[3, 0] = weight[4, 0] = 25.0
    x = torch.tensor([[1.0, 0.0]], device=DEVICE)
    ids = torch.tensor([[3, 4]], device=DEVICE)
    forward = FORWARD.kernels.get(implementation, FORWARD.definition)
    logits, rest, _ = forward(x, weight, ids)
    log_q = torch.cat([logits, rest.unsqueeze(-1)], -1).double().log_softmax(-1)
    assert log_q[0, 2].item() == pytest.approx(math.log(48) - 25 - math.log(2), rel=1e-6)
    assert rest.item() == pytest.approx(math.log(48), rel=1e-6)


def test_a_confident_teacher_has_finite_divergences() -> None:
    """The log-probabilities of such a teacher sum to 1 in float32, or to a little more."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    ids = torch.tensor([[3, 1]]).expand(3, 2)
    log_prob = torch.tensor([[0.0, -20.0], [1e-3, -9.0], [-1e-8, -40.0]])
    for kind in KINDS:
        found = liger_ops.linear_top_k_divergence(x, weight, ids, log_prob, kind=kind)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert bool(found.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("mask", ((True, True, True), (True, False, False)))
def test_tokens_without_a_word(implementation: str, mask: tuple[bool, ...]) -> None:
    """Results and gradients are exactly 0, whatever the logits and the incoming gradients are."""
    case = TopKCase(shape=(4,), ignored="none", mask=mask, K=2, chunk_bytes=60)
    tensors = OP.tensors(case)
    tensors["x"][1], tensors["teacher_ids"][1] = NAN, torch.tensor([-1, -100])
    functions = (op.kernels.get(implementation, op.definition) for op in (FORWARD, BACKWARD))
    forward, backward = functions
    outputs = forward(*OP.forward_args(case, tensors))
    assert bool((outputs[0][1] == -INF).all()) and outputs[1][1] == 0
    assert all(output[[0, 2, 3]].isfinite().all() for output in outputs)
    tensors.update(zip(("logits", "rest", "rest_error"), outputs, strict=True))
    for name in UPSTREAM:
        tensors[name][1] = INF
    if mask[1]:
        # The products with NaN of x are NaN in the weight's gradient, as those of any head.
        tensors["x"][1] = 1.0
    dx, *others = backward(*OP.backward_args(case, tensors))
    assert bool((dx[1] == 0).all()) and dx[0].abs().max() > 0
    assert all(gradient is None or gradient.isfinite().all() for gradient in (dx, *others))


def test_ignored_tokens_and_words_that_come_twice() -> None:
    x, weight = torch.randn(4, 5), torch.randn(9, 5)
    ids, log_prob, _ = teacher(4, 9, 3, torch.float32)
    twice = torch.cat([ids, ids[:, :1]], -1)
    again = torch.cat([log_prob, log_prob[:, :1] - 1], -1)
    call = liger_ops.linear_top_k_divergence
    target = torch.tensor([0, -1, 5, -1])
    found = call(x, weight, twice, again, None, target, ignore_index=-1)
    torch.testing.assert_close(found, call(x, weight, ids, log_prob) * (target >= 0))
    assert torch.equal(found[[1, 3]], torch.zeros(2))
    # Both have the same words in another order.
    order = torch.tensor([2, 0, 1])
    shuffled = call(x, weight, ids[:, order].int(), log_prob[:, order])
    torch.testing.assert_close(shuffled, call(x, weight, ids, log_prob))


@EVERY_FOLDER
def test_words_out_of_range(folder: str) -> None:
    x, weight, ids = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([[1, 5], [0, 2]])
    message = "linear_top_k_divergence: teacher_ids must be negative, or from 0 to 4, got one"
    with pytest.raises(IndexError, match=message):
        liger_ops.linear_top_k_divergence(x, weight, ids, torch.zeros(2, 2))
    logits, rest, _ = FORWARD.kernels[folder](x, weight, ids)
    assert logits.isnan().tolist() == [[False, True], [False, False]] and rest.isfinite().all()


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("mask", ((True, True, True), (True, False, False)))
def test_the_backward_of_words_that_the_weight_lacks(
    implementation: str, mask: tuple[bool, ...]
) -> None:
    """The gradients of parts of a weight, from the results for the whole."""
    case = TopKCase(shape=(6,), V=7, D=4, K=3, ignored="some", softcap=3.0, mask=mask)
    tensors = OP.tensors(case)
    backward = BACKWARD.kernels.get(implementation, BACKWARD.definition)
    dx, dweight, dbias, *_ = backward(*OP.backward_args(case, tensors))
    parts = []
    for words in (slice(0, 4), slice(4, 7)):
        size = words.stop - words.start
        ids = tensors["teacher_ids"]
        here = (ids >= words.start) & (ids < words.stop)
        local = torch.where(here, ids - words.start, torch.where(ids < 0, -1, size))
        part = {**tensors, "teacher_ids": local}
        part |= {name: tensors[name][words] for name in ("weight", "bias")}
        parts.append(backward(*OP.backward_args(case, part)))
    torch.testing.assert_close(parts[0][0] + parts[1][0], dx)
    for i, whole in ((1, dweight), (2, dbias)):
        assert (whole is None) == (not mask[i])
        if whole is not None:
            torch.testing.assert_close(torch.cat([parts[0][i], parts[1][i]]), whole)


def test_a_lora_and_autocast() -> None:
    """A LoRA is that of the weight which it forms; autocast casts as it casts a linear layer."""
    x, weight, bias = torch.randn(4, 5), torch.randn(9, 5), torch.randn(9)
    ids, log_prob, _ = teacher(4, 9, 3, torch.float32)
    call = liger_ops.linear_top_k_divergence
    a, b = torch.randn(2, 5), torch.randn(9, 2)
    lora: dict[str, Any] = {"lora_a": a, "lora_b": b, "lora_scale": 0.7}
    found = call(x, weight, ids, log_prob, bias, **lora)
    torch.testing.assert_close(found, call(x, weight + 0.7 * b @ a, ids, log_prob, bias))
    with torch.autocast("cpu", torch.bfloat16):
        cast = call(x, weight, ids, log_prob, bias)
    narrow = (tensor.bfloat16() for tensor in (x, weight))
    assert torch.equal(cast, call(*narrow, ids, log_prob, bias.bfloat16()))


def test_the_module() -> None:
    x, weight, bias = torch.randn(4, 8), torch.randn(9, 8), torch.randn(9)
    ids, log_prob, _ = teacher(4, 9, 3, torch.float32)
    module = liger_ops.nn.LinearTopKDivergence("tvd", tail="zero", logit_scale=0.7, chunk_bytes=64)
    found = module(x, weight, ids, log_prob, bias)
    expected = liger_ops.linear_top_k_divergence(
        x, weight, ids, log_prob, bias, None, "tvd", 0.5, "zero", logit_scale=0.7
    )
    torch.testing.assert_close(found, expected)
    assert repr(module) == (
        "LinearTopKDivergence(kind='tvd', tail='zero', logit_scale=0.7, chunk_bytes=64)"
    )
    for option, value in (("temperature", -1.0), ("tail", "none"), ("chunk_bytes", 0)):
        with pytest.raises(ValueError, match=f"linear_top_k_divergence: {option} must be"):
            liger_ops.nn.LinearTopKDivergence(**{option: value})
