"""The gradients of linear_cross_entropy: which are computed, when, and for which results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from head_calls import FORWARD, MASKS, Calls, call, leaves
from liger_ops import library
from linear_cross_entropy_cases import NO_GRADIENTS, WITHOUT_LORA, HeadCase


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("mask", MASKS)
def test_gradient_present_exactly_when_required(reduction: str, mask: tuple[bool, ...]) -> None:
    """Each gradient equals that of a call with all, and the forward computes no others."""
    args, tensors = leaves(HeadCase(reduction=reduction, dtype=torch.float64))
    expected = torch.autograd.grad(call(args).sum(), tensors)
    for tensor, wanted in zip(tensors, mask, strict=True):
        tensor.requires_grad_(wanted)
    with Calls() as calls:
        loss = call(args).sum()
        assert loss.requires_grad == any(mask)
        if any(mask):
            loss.backward()
    mask = (*mask, False, False)
    in_forward = [wanted and reduction != "none" for wanted in mask]
    assert calls.masks("linear_cross_entropy_forward") == [in_forward]
    recomputes = reduction == "none" and any(mask)
    assert calls.recomputed() == ([list(mask)] if recomputes else [])
    for tensor, wanted, gradient in zip(tensors, mask, expected, strict=False):
        assert (tensor.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_without_gradients_none_is_computed(context: Callable[[], Any]) -> None:
    args, _ = leaves(HeadCase())
    with context(), Calls() as calls:
        loss = call(args)
    assert not loss.requires_grad
    assert calls.masks("linear_cross_entropy_forward") == [NO_GRADIENTS]
    with torch.no_grad():
        *_, dx, dweight, dbias, dlora_x, dlora_b = FORWARD.definition(*args)
    assert dx is dweight is dbias is dlora_x is dlora_b is None


def test_a_reentrant_checkpoint_computes_gradients_in_its_second_pass_alone() -> None:
    args, tensors = leaves(HeadCase())
    expected = torch.autograd.grad(call(args), tensors)
    with Calls() as calls:
        checkpoint(
            lambda *x: call([x[0], x[1], args[2], x[2], *args[4:]]), *tensors, use_reentrant=True
        ).backward()
    assert calls.masks("linear_cross_entropy_forward") == [NO_GRADIENTS, WITHOUT_LORA]
    for tensor, gradient in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_a_second_backward_equals_the_first(dtype: torch.dtype, reduction: str) -> None:
    """Up to rounding, because the first takes the weight's from the forward; and gradients of two
    losses of one head accumulate."""
    args, tensors = leaves(HeadCase(reduction=reduction, dtype=dtype))
    loss = call(args).sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    before = [gradient.clone() for gradient in first]
    bounds = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    for _ in range(2):
        second = torch.autograd.grad(loss, tensors, retain_graph=True)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, **bounds)
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
    for _ in range(2):
        call(args).sum().backward()
    for tensor, gradient in zip(tensors, first, strict=True):
        assert torch.equal(tensor.grad, gradient + gradient)


def narrow(dtype: torch.dtype) -> HeadCase:
    """The forward's sum is the weight's gradient itself."""
    return HeadCase(dtype=dtype, reduction="mean", accumulate_narrow=dtype is not torch.float32)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_weights_gradient_takes_no_second_memory(dtype: torch.dtype) -> None:
    """The backward multiplies it in place, and gives what it would give otherwise."""
    args, tensors = leaves(narrow(dtype))
    with Calls():
        expected = torch.autograd.grad(0.37 * call(args), tensors)
    made = []
    forward = library.OPS["linear_cross_entropy_forward"]
    real = forward.setup_context

    def recorded(ctx: Any, inputs: Any, output: Any) -> None:
        made.append(output[9].data_ptr())
        real(ctx, inputs, output)

    forward.setup_context = recorded
    try:
        loss = call(args)
    finally:
        forward.setup_context = real
    found = torch.autograd.grad(0.37 * loss, tensors)
    assert found[1].data_ptr() == made[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_who_sees_the_gradient_keeps_it() -> None:
    """The caller of the forward op, and hooks of saved tensors."""
    args, tensors = leaves(narrow(torch.bfloat16))
    outputs = FORWARD.overload(*args, False, False, [True, True, True, False, False])
    before = outputs[9].clone()
    torch.autograd.grad(3 * outputs[0], tensors)
    assert torch.equal(outputs[9], before)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        loss = call(args)
    kept = [x.clone() for x in packed]
    torch.autograd.grad(3 * loss, tensors)
    assert any(x.shape == tensors[1].shape and torch.equal(x, outputs[9]) for x in packed)
    assert all(torch.equal(a, b) for a, b in zip(packed, kept, strict=True))


def test_what_the_forward_computed_serves_once_and_for_any_loss() -> None:
    """A function of the loss, and the forward op itself with some gradients not requested."""
    args, tensors = leaves(HeadCase(dtype=torch.float64))
    expected = [3 * gradient for gradient in torch.autograd.grad(call(args), tensors)]
    for mask in MASKS:
        outputs = library.OPS["linear_cross_entropy_forward"].overload(
            *args, False, False, [*mask, False, False]
        )
        with Calls() as calls:
            gradients = torch.autograd.grad(3 * outputs[0], tensors)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b)
        missing = [*(not computed for computed in mask), False, False]
        assert calls.recomputed() == ([missing] if any(missing) else [])
