"""The LoRA of a head, in linear_cross_entropy, linear_log_prob and linear_divergence, whose kernels
are in test_linear_divergence_lora.py: logits are those of a head whose
input is x and lora_x side by side, and whose weight is weight and lora_b side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
import simulated_npu
from graphs import Recorder, liger_ops_of
from head_calls import Calls
from liger_ops import library
from linear_log_prob_cases import LogProbHeadCase
from linear_log_prob_cases import tensors as tensors_of
from op_checks import assert_own_memory, assert_unchanged, clones, poisoned_memory
from op_under_test import DEVICE, FOLDERS, X_LAYOUTS, Values, max_abs

OPS = ("linear_cross_entropy", "linear_log_prob")
EVERY_OP = pytest.mark.parametrize("op", OPS)
COMPOSED = (*OPS, "linear_divergence")
EVERY_COMPOSED = pytest.mark.parametrize("op", COMPOSED)
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
EVERY_IMPLEMENTATION = pytest.mark.parametrize("implementation", ("definition", *FOLDERS))
HEAD = ("x", "weight", "bias", "lora_x", "lora_b")
MOSTLY = st.sampled_from((True, True, True, False))


def implementation_of(name: str, where: str) -> Callable[..., Any]:
    op = library.OPS[name]
    return op.definition if where == "definition" else op.kernels[where]


def results(
    op: str, where: str, case: LogProbHeadCase, tensors: dict[str, Any], upstream: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """The results of a token, and the gradients for an upstream gradient of each. The first op
    computes gradients in the forward for the reduction "sum", where all upstream gradients are 1.
    """
    forward, backward = (implementation_of(f"{op}_{n}", where) for n in ("forward", "backward"))
    given = {name: tensors[name] for name in (*HEAD, "target")}
    form = {
        "ignore_index": -100,
        "accum_dtype": case.dtype if case.accumulate_narrow else None,
        "chunk_bytes": case.chunk_bytes,
    }
    if op == "linear_log_prob":
        outputs = forward(**given, **form)
        found = list(outputs[:3])
        options = {
            "temperature": 1.0,
            "softcap": None,
            "logit_scale": 1.0,
            "output_mask": case.mask,
        }
        names = ("dlog_prob", "dentropy", "dlse")
        statistics = {"entropy": found[1], "lse": found[2], "lse_error": outputs[-1]}
        grads = dict(zip(names, upstream, strict=True))
        return found, backward(**grads, **given, **statistics, **options, **form)
    mask = [wanted and case.reduction == "sum" for wanted in case.mask]
    outputs = forward(**given, **form, reduction=case.reduction, gradient_mask=mask)
    if case.reduction == "sum":
        return [outputs[2]], outputs[8:]
    names = ("class_weight", "token_weight", "num_items_in_batch", "dx", "dweight", "dbias",
             "softcap", "dz_loss", "dlse", "dtarget_logit")  # fmt: skip
    options = dict.fromkeys(names) | {"label_smoothing": 0.0, "lse_square_scale": 0.0}
    options |= {"logit_scale": 1.0, "output_mask": case.mask, "reduction": "none"}
    statistics = {"lse": outputs[2], "total_weight": outputs[4], "lse_error": outputs[7]}
    gradients = backward(dloss=upstream[0], **given, **statistics, **options, **form)
    return [outputs[2], outputs[0]], gradients


def truth(
    op: str, case: LogProbHeadCase, tensors: dict[str, Any], upstream: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The same in float64 by PyTorch, of the heads side by side; the logits; and the size of the
    terms that the gradient of each logit is made of."""
    wide = {name: None if tensors[name] is None else tensors[name].double() for name in HEAD}
    x = torch.cat([wide["x"], wide["lora_x"]], -1).requires_grad_()
    weight = torch.cat([wide["weight"], wide["lora_b"]], -1).requires_grad_()
    bias = wide["bias"] if wide["bias"] is None else wide["bias"].requires_grad_()
    logits = F.linear(x, weight, bias)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    target, kept = tensors["target"].long(), (tensors["target"] != -100).double()
    log_prob = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * kept
    entropy = -(p * log_p).sum(-1) * kept
    lse = logits.logsumexp(-1)
    one_hot = F.one_hot(target.clamp(min=0), case.V)
    if op == "linear_log_prob":
        found = [log_prob, entropy, lse * kept]
        sizes = [one_hot + p, p * (1 + (log_p + entropy.unsqueeze(-1)).abs()), p]
    else:
        found = [-log_prob]
        sizes = [one_hot + p]
    total = sum((value * grad.double()).sum() for value, grad in zip(found, upstream, strict=True))
    terms = sum(
        size * (grad.double().abs() * kept).unsqueeze(-1)
        for size, grad in zip(sizes, upstream, strict=True)
    )
    leaves = [x, weight] if bias is None else [x, weight, bias]
    dx, dweight, *dbias = torch.autograd.grad(total, leaves)
    D = case.D
    gradients = [dx[..., :D], dweight[:, :D], *(dbias or [None]), dx[..., D:], dweight[:, D:]]
    if op == "linear_cross_entropy":
        found = [lse] if case.reduction == "sum" else [lse, -log_prob]
    return [value.detach() for value in found], gradients, logits.detach(), terms.detach()


def gradient_bounds(
    case: LogProbHeadCase, tensors: dict[str, Any], logits: Tensor, terms: Tensor
) -> dict[str, float]:
    """What two roundings of the logits, and one of their gradient, may change each gradient by, and
    one rounding of a sum per chunk if the sums are in the tensors' dtype."""
    eps = torch.finfo(case.dtype).eps
    bounds = ((2 * eps + 4 * rounding(case, logits)) * terms).reshape(-1, case.V)
    terms = terms.reshape(-1, case.V)
    wide = {name: tensors[name].double().abs() for name in HEAD if name != "bias"}
    of_rows = {"x": wide["weight"], "lora_x": wide["lora_b"]}
    of_weights = {"weight": wide["x"], "lora_b": wide["lora_x"]}
    chunks = eps * max(terms.shape) if case.accumulate_narrow else 0.0
    found = {"bias": max_abs(bounds.sum(0))}
    for name, weight in of_rows.items():
        found[name] = max_abs(bounds @ weight) + chunks * max_abs(terms @ weight)
    for name, rows in of_weights.items():
        rows = rows.reshape(-1, rows.shape[-1])
        found[name] = max_abs(bounds.T @ rows) + chunks * max_abs(terms.T @ rows)
    return found


def rounding(case: LogProbHeadCase, logits: Tensor) -> float:
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    return (2 * eps + 16 * eps32) * (max_abs(logits) + math.log(case.V))


def assert_no_further(
    label: str, output: Tensor, reference: Tensor, truth: Tensor, bound: float
) -> None:
    assert (output.shape, output.dtype) == (reference.shape, reference.dtype), label
    own, error = (max_abs(value.double() - truth) for value in (reference, output))
    assert error <= 2 * own + bound, f"{label}: {error} of at most 2 * {own} + {bound}"


@st.composite
def cases(draw: st.DrawFn) -> LogProbHeadCase:
    """Mostly of several chunks, with all gradients."""
    bias = draw(st.booleans())
    mask = tuple(draw(MOSTLY) for _ in range(5))
    return LogProbHeadCase(
        shape=draw(st.sampled_from(((9,), (2, 3), (3, 1, 2), (1,), (), (0,)))),
        D=draw(st.sampled_from((7, 16, 1))),
        V=draw(st.sampled_from((7, 16, 33, 1))),
        rank=draw(st.sampled_from((3, 8, 1))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        bias=bias,
        ignored=draw(st.sampled_from(("some", "some", "none", "all"))),
        reduction=draw(st.sampled_from(("sum", "none"))),
        accumulate_narrow=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from((60, 400, 1, None))),
        scale=draw(st.sampled_from((1.0, 0.05))),
        mask=(*mask[:2], mask[2] and bias, *mask[3:]),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.device_kernels
@EVERY_FOLDER
@EVERY_OP
@given(case=cases())
def test_kernels_match_the_heads_side_by_side(folder: str, op: str, case: LogProbHeadCase) -> None:
    tensors = tensors_of(case)
    values = Values(case.seed + 3)
    count = 3 if op == "linear_log_prob" else 1
    upstream = [values.draw(case.shape, torch.float32) for _ in range(count)]
    if op == "linear_cross_entropy" and case.reduction == "sum":
        upstream = [torch.ones(case.shape, device=DEVICE)]
    given = tuple(value for value in tensors.values() if value is not None)
    before = clones(given)
    with poisoned_memory():
        found, gradients = results(op, folder, case, tensors, upstream)
    assert_unchanged(given, before)
    assert_own_memory(given, (*found, *gradients))
    expected, of_definition = results(op, "definition", case, tensors, upstream)
    exact, exact_gradients, logits, terms = truth(op, case, tensors, upstream)
    bound = 2 * rounding(case, logits) * (1 + math.log(case.V))
    label = f"{op} on {folder} of {case}"
    for output, reference, value in zip(found, expected, exact, strict=True):
        assert_no_further(label, output, reference, value, bound)
    bounds = gradient_bounds(case, tensors, logits, terms)
    for name, wanted, output, reference, value in zip(
        HEAD, case.mask, gradients, of_definition, exact_gradients, strict=True
    ):
        assert (output is not None) == wanted, label
        if wanted:
            bound = bounds[name] + torch.finfo(case.dtype).tiny
            assert_no_further(f"d{name}, {label}", output, reference, value, bound)


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("op, reduction", ((OPS[0], "sum"), (OPS[0], "none"), (OPS[1], "sum")))
def test_no_gradient_of_a_frozen_weight(implementation: str, op: str, reduction: str) -> None:
    """Neither it, nor the adapted weight, nor the logits are ever whole in memory."""
    case = LogProbHeadCase(
        shape=(8,), V=64, D=16, rank=2, reduction=reduction, bias=False,
        chunk_bytes=2 * 64 * 4, mask=(True, False, False, True, True),
    )  # fmt: skip
    tensors = tensors_of(case)
    upstream = [torch.ones(8, device=DEVICE)] * (3 if op == "linear_log_prob" else 1)
    with Calls() as calls:
        _, gradients = results(op, implementation, case, tensors, upstream)
    assert [gradient is not None for gradient in gradients] == list(case.mask)
    # The definition has int64 tensors of a chunk.
    assert 2 * 64 * 4 <= calls.largest <= 2 * 64 * 8


def composed(op: str, reduction: str = "mean") -> Callable[..., Tensor]:
    """A loss of the composed op, as a function of x, weight, bias, lora_a and lora_b."""

    def loss(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        lora = {"lora_a": a, "lora_b": b, "lora_scale": 0.7, "chunk_bytes": 60}
        if op != "linear_log_prob":
            if op == "linear_cross_entropy":
                losses = liger_ops.linear_cross_entropy(
                    x, weight, target_of(x), bias, reduction=reduction, **lora
                )
            else:
                options = {f"student_{name}": value for name, value in lora.items()}
                options |= {"target": target_of(x), "student_bias": bias, **taught(x, True)}
                options["chunk_bytes"] = options.pop("student_chunk_bytes")
                losses, *_ = liger_ops.linear_divergence(
                    x, weight, **options, temperature=0.8, hard_weight=0.5, reduction=reduction
                )
            return losses.square().sum() if reduction == "none" else losses
        log_prob, entropy = liger_ops.linear_log_prob(x, weight, target_of(x), bias, **lora)
        return log_prob.sin().sum() + entropy.square().sum()

    return loss


def adapted(op: str, reduction: str = "mean") -> Callable[..., Tensor]:
    """The same by PyTorch, of the weight with the LoRA added to it."""

    def loss(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        logits = F.linear(x, weight + 0.7 * b @ a, bias)
        target = target_of(x)
        losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        if op == "linear_divergence":
            q, p = ((z / 0.8).softmax(-1) for z in (logits, taught(x, False)))
            kl = lambda a, b: (a * (a.log() - b.log())).sum(-1)
            m = (p + q) / 2
            soft = (kl(p, m) + kl(q, m)).flatten() / 2
            losses = losses / 2 + soft * (target.flatten() != -100)
        if op != "linear_log_prob":
            kept = (target != -100).sum()
            return losses.square().sum() if reduction == "none" else losses.sum() / kept
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) * (target != -100)
        return (-losses).sin().sum() + entropy.square().sum()

    return loss


def taught(x: Tensor, by_layer: bool) -> Any:
    """The arguments of a teacher with a LoRA, or its logits."""

    def values(*shape: int) -> Tensor:
        numbers = torch.arange(math.prod(shape), device=x.device) * 0.7
        # Every dtype has the same values.
        return numbers.sin().bfloat16().to(x.dtype).reshape(shape)

    hidden, weight, a, b = values(*x.shape[:-1], 6), values(7, 6), values(3, 6), values(7, 3)
    if not by_layer:
        return F.linear(hidden, weight + 0.4 * b @ a)
    lora = {"teacher_lora_a": a, "teacher_lora_b": b, "teacher_lora_scale": 0.4}
    return {"teacher_x": hidden, "teacher_weight": weight, **lora}


def target_of(x: Tensor) -> Tensor:
    target = torch.arange(math.prod(x.shape[:-1]), device=x.device).reshape(x.shape[:-1]) % 7
    return torch.where(target == 2, -100, target)


def head(dtype: torch.dtype = torch.float64, rows: int = 3) -> tuple[Tensor, ...]:
    """x, weight, bias, lora_a and lora_b."""
    shapes = ((rows, 2, 5), (7, 5), (7,), (4, 5), (7, 4))
    values = Values(1)
    return tuple(values.draw(shape, dtype, scale=0.5).requires_grad_() for shape in shapes)


FORMS = pytest.mark.parametrize(
    "op, reduction",
    (
        (OPS[0], "mean"),
        (OPS[0], "none"),
        (OPS[1], ""),
        (COMPOSED[2], "mean"),
        (COMPOSED[2], "none"),
    ),
)


@FORMS
def test_derivatives(op: str, reduction: str) -> None:
    ours, theirs = composed(op, reduction), adapted(op, reduction)
    tensors = head()
    compare = torch.testing.assert_close
    gradients = torch.autograd.grad(ours(*tensors), tensors)
    compare(gradients, torch.autograd.grad(theirs(*tensors), tensors))
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    second = []
    for loss in (ours, theirs):
        first = torch.autograd.grad(loss(*tensors), tensors, create_graph=True)
        second.append(torch.autograd.grad(sum(grad.pow(3).sum() for grad in first), tensors))
    compare(*second)
    plain = tuple(tensor.detach() for tensor in tensors)
    every = tuple(range(5))
    compare(torch.func.grad(ours, every)(*plain), gradients)
    tangents = tuple(torch.randn_like(tensor) for tensor in plain)
    compare(torch.func.jvp(ours, plain, tangents), torch.func.jvp(theirs, plain, tangents))
    adapters = torch.stack([plain[3], 2 * plain[3]])
    one = (None, None, None, 0, None)
    compare(
        torch.vmap(torch.func.grad(ours, 4), one)(*plain[:3], adapters, plain[4]),
        torch.vmap(torch.func.grad(theirs, 4), one)(*plain[:3], adapters, plain[4]),
    )


@FORMS
def test_only_the_adapter_and_x_have_gradients(op: str, reduction: str) -> None:
    """As in a step of training: the forward is not asked for the weight's gradient, and a second
    backward gives the same."""
    x, weight, bias, a, b = head(torch.float32)
    with Calls() as calls:
        loss = composed(op, reduction)(x, weight.detach(), bias.detach(), a, b)
        first = torch.autograd.grad(loss, (x, a, b), retain_graph=True)
        second = torch.autograd.grad(loss, (x, a, b))
    (backward, *_) = calls.arguments(f"{op}_backward")
    call = library.OPS[f"{op}_backward"].arguments(*backward)
    assert call.output_mask == [True, False, False, True, True]
    if reduction == "mean":
        assert calls.masks(f"{op}_forward") == [[True, False, False, True, True]]
    expected = torch.autograd.grad(adapted(op, reduction)(x, weight, bias, a, b), (x, a, b))
    for gradient, again, value in zip(first, second, expected, strict=True):
        assert torch.equal(gradient, again)
        torch.testing.assert_close(gradient, value)


@EVERY_COMPOSED
def test_compiled_once_for_two_shapes(op: str) -> None:
    recorder = Recorder()
    loss = composed(op)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=recorder.backend())
    for rows in (3, 6):
        tensors = head(torch.float32, rows)
        values = [run(*tensors) for run in (compiled, loss)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(value, tensors) for value in values))
    assert liger_ops_of(recorder.forwards) == {f"{op}_forward": 1}
    assert liger_ops_of(recorder.backwards) == {f"{op}_backward": 1}


@EVERY_COMPOSED
def test_dtypes_of_an_adapter(op: str) -> None:
    """A float32 adapter of a bfloat16 head, and autocast, as by linear layers."""
    x, weight, bias, a, b = head(torch.float32)
    narrow = [tensor.detach().bfloat16() for tensor in (x, weight, bias)]
    gradients = torch.autograd.grad(composed(op)(*narrow, a, b), (a, b))
    exact = torch.autograd.grad(adapted(op)(*(t.float() for t in narrow), a, b), (a, b))
    for gradient, value in zip(gradients, exact, strict=True):
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient, value, rtol=0.05, atol=0.05 * max_abs(value))
    with torch.autocast("cpu", torch.bfloat16):
        ours = composed(op)(x, weight, bias, a, b)
    assert torch.equal(ours, composed(op)(*narrow, a.bfloat16(), b.bfloat16()))
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(ours, (x, weight, a, b)))


@EVERY_COMPOSED
def test_training_on_the_simulated_npu(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    tensors = head(torch.float32)
    expected = torch.autograd.grad(composed(op)(*tensors), tensors)
    on_npu = [simulated_npu.to_npu(tensor.detach()).requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(composed(op)(*on_npu), on_npu)
    for gradient, value in zip(found, expected, strict=True):
        torch.testing.assert_close(simulated_npu.to_cpu(gradient), value)


def test_modules() -> None:
    x, weight, bias, a, b = head(torch.float32)
    target = target_of(x)
    lora = {"lora_a": a, "lora_b": b, "lora_scale": 0.7}
    expected = adapted(OPS[0])(x, weight, bias, a, b)
    for options in ({}, {"return_entropy": True, "return_token_accuracy": True}):
        module = liger_ops.nn.LinearCrossEntropyLoss(**options)
        output = module(x, weight, target, bias, **lora)
        loss = output.loss if options else output
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, (a, b)),
            torch.autograd.grad(expected, (a, b), retain_graph=True),
        )
    found = liger_ops.nn.LinearLogProb()(x, weight, target, bias, **lora)
    formed = liger_ops.nn.LinearLogProb()(x, weight + 0.7 * b @ a, target, bias)
    torch.testing.assert_close(found, formed)
    expected = adapted(COMPOSED[2])(x, weight, bias, a, b)
    lora = {f"student_{name}": value for name, value in lora.items()}
    module = liger_ops.nn.LinearDivergence(temperature=0.8, hard_weight=0.5)
    options = {"student_bias": bias, "target": target, **taught(x, True), **lora}
    torch.testing.assert_close(module(x, weight, **options)[0], expected)


@EVERY_OP
@pytest.mark.parametrize("compiles", (False, True))
def test_rejects(op: str, compiles: bool) -> None:
    x, weight, a, b = (torch.zeros(shape) for shape in ((2, 3), (5, 3), (4, 3), (5, 4)))
    target = torch.zeros(2, dtype=torch.int64)
    call = getattr(liger_ops, op)
    if compiles:
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager", fullgraph=True, dynamic=False)
    for error, lora, message in (
        (ValueError, (a, None), "lora_b must be given with lora_a, got None"),
        (ValueError, (None, b), "lora_a must be given with lora_b, got None"),
        (ValueError, (a[:, :2], b), "lora_a must be (R, D) with D of x, (4, 3), got (4, 2)"),
        (ValueError, (a[0], b), "lora_a must be (R, D) with D of x, (3, 3), got (3,)"),
        (ValueError, (a, b[:4]), "lora_b must be (V, R) with V of weight and R of lora_a, (5, 4),"),
        (ValueError, (a[:2], b), "lora_b must be (V, R) with V of weight and R of lora_a, (5, 2),"),
        (TypeError, (a.long(), b), "lora_a must be a floating point tensor, got torch.int64"),
        (ValueError, (a, b.to("meta")), "lora_b must be on x's device, cpu, got meta"),
    ):
        # Dynamo raises an error of its own, which holds the op's message.
        with pytest.raises(Exception if compiles else error) as raised:
            call(x, weight, target, lora_a=lora[0], lora_b=lora[1])
        assert f"{op}: {message}" in str(raised.value).replace("\\'", "'")


@EVERY_OP
def test_the_forward_op_rejects(op: str) -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    target = torch.zeros(2, dtype=torch.int64)
    lora_x, lora_b = torch.zeros(2, 4), torch.zeros(5, 4)
    call = getattr(liger_ops, f"{op}_forward")
    for error, lora, message in (
        (ValueError, (lora_x, None), "lora_b must be given with lora_x, got None"),
        (ValueError, (None, lora_b), "lora_x must be given with lora_b, got None"),
        (ValueError, (lora_x[:1], lora_b), "lora_x must have the shape of x but for its last"),
        (
            ValueError,
            (lora_x, lora_b[:, :2]),
            "lora_b must have the shape of weight but for its last",
        ),
        (TypeError, (lora_x.double(), lora_b), "lora_x must have x's dtype, torch.float32"),
        (TypeError, (lora_x, lora_b.long()), "lora_b must be a floating point tensor"),
    ):
        with pytest.raises(error, match=f"^{op}: {message}"):
            call(x, weight, target, lora_x=lora[0], lora_b=lora[1])
