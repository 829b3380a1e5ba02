"""The LoRA of a head, in linear_cross_entropy, linear_log_prob and linear_divergence, against a
weight with the LoRA added to it. The kernels' tests are those of each op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
import simulated_npu
from graphs import Recorder, liger_ops_of
from head_calls import Calls
from liger_ops import library
from op_under_test import Values, max_abs

OPS = ("linear_cross_entropy", "linear_log_prob", "linear_divergence")
EVERY_OP = pytest.mark.parametrize("op", OPS)


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
            if reduction == "none":
                return losses.square().sum()
            return losses.sum() / (1 if reduction == "sum" else kept)
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
        (OPS[0], "mean"), (OPS[0], "sum"), (OPS[0], "none"), (OPS[1], ""), (OPS[2], "mean"),
        (OPS[2], "none"),
    ),
)  # fmt: skip


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
    if reduction in ("mean", "sum"):
        assert calls.masks(f"{op}_forward") == [[True, False, False, True, True]]
    expected = torch.autograd.grad(adapted(op, reduction)(x, weight, bias, a, b), (x, a, b))
    for gradient, again, value in zip(first, second, expected, strict=True):
        assert torch.equal(gradient, again)
        torch.testing.assert_close(gradient, value)


@EVERY_OP
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


@EVERY_OP
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


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("is_autocast", (False, True))
def test_no_further_from_float64_than_peft(dtype: torch.dtype, is_autocast: bool) -> None:
    """The gradients with a float32 adapter, by their mean error in five draws."""

    def by_peft(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        logits = (logits + F.linear(F.linear(x.to(a.dtype), a), b)).to(logits.dtype)
        return F.cross_entropy(
            logits.double() if x.dtype is torch.float64 else logits.float(), target
        )

    def by_op(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
        return liger_ops.linear_cross_entropy(x, weight, target, lora_a=a, lora_b=b)

    found = []
    for seed in range(5):
        drawn = torch.Generator().manual_seed(seed)
        shapes = ((64, 96), (300, 96), (8, 96), (300, 8))
        x, weight, a, b = (torch.randn(*shape, generator=drawn) for shape in shapes)
        given = [x.to(dtype), (weight / 10).to(dtype), a / 10, b]
        target = torch.randint(300, (64,), generator=drawn)

        def gradients(loss: Any, *tensors: Tensor, target: Tensor = target) -> list[Tensor]:
            leaves = [one.clone().requires_grad_() for one in tensors]
            enabled = is_autocast and tensors[2].dtype is torch.float32
            with torch.autocast("cpu", dtype, enabled=enabled):
                y = loss(*leaves, target)
            return [one.double() for one in torch.autograd.grad(y, leaves)]

        exact = gradients(by_peft, *(one.double() for one in given))
        pairs = (gradients(loss, *given) for loss in (by_op, by_peft))
        found.append(
            [
                [float((g - t).norm() / t.norm()) for g, t in zip(one, exact, strict=True)]
                for one in pairs
            ]
        )
    ours, theirs = torch.tensor(found).mean(0)
    assert (ours <= torch.tensor([1.2, 1.2, 1.9, 1.9]) * theirs).all()


@EVERY_OP
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
    expected = adapted(OPS[2])(x, weight, bias, a, b)
    lora = {f"student_{name}": value for name, value in lora.items()}
    module = liger_ops.nn.LinearDivergence(temperature=0.8, hard_weight=0.5)
    options = {"student_bias": bias, "target": target, **taught(x, True), **lora}
    torch.testing.assert_close(module(x, weight, **options)[0], expected)
