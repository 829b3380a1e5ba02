"""Cases of heads whose backward recomputes logits, and the bounds of their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import op_checks
from liger_ops import library
from op_under_test import DY_LAYOUTS, EVERY_FOLDER, X_LAYOUTS, OpUnderTest, Tensors, max_abs

MOSTLY = st.sampled_from((True, True, True, False))


def implementation_of(op: library.Op, where: str) -> Callable[..., Any]:
    """Return the kernels of the folder `where`, or the op's definition if it has none there."""
    return op.kernels.get(where, op.definition)


def head_fields(draw: st.DrawFn, results: int, **more: Sequence[Any]) -> dict[str, Any]:
    """Draw the fields of a head: mostly several chunks, and all gradients."""
    bias, *mask = draw(st.booleans()), *(draw(MOSTLY) for _ in range(5))
    choices = {
        "shape": ((9,), (2, 3), (5,), (3, 1, 2), (1,), (), (0,), (2, 0)),
        "D": (7, 4, 16, 1), "V": (7, 16, 33, 130, 2, 1),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "layout": X_LAYOUTS, "dy_layout": DY_LAYOUTS,
        "ignored": ("some", "some", "none", "all"), "target_dtype": (torch.int64, torch.int32),
        "temperature": (1.0, 0.6), "softcap": (None, 5.0), "logit_scale": (1.0, 0.25),
        "accumulate_narrow": (False, True), "chunk_bytes": (60, 400, 1, None),
        "scale": (1.0, 0.05, 4.0), "rank": (None, None, 3, 1), **more,
    }  # fmt: skip
    fields = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    has_lora = fields["rank"] is not None
    return {
        **fields,
        "bias": bias,
        "mask": (*mask[:2], mask[2] and bias, *(wanted and has_lora for wanted in mask[3:])),
        "upstream": tuple(draw(MOSTLY) for _ in range(results)),
        "seed": draw(st.integers(0, 2**31)),
    }


def run(op: OpUnderTest, folder: str, backward: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run kernels, and check that arguments are unchanged and that results have memory of their
    own."""
    before = op_checks.clones(args)
    with op_checks.poisoned_memory():
        outputs = op_checks.as_tuple(op.kernel(folder, backward)(*args))
    op_checks.assert_unchanged(args, before)
    op_checks.assert_own_memory(args, outputs)
    op_checks.assert_allocated_as_meta(op, backward, args, outputs)
    return outputs


def drawn(cases: Any, *examples: Any, fewer: int = 1) -> Callable[..., Any]:
    """Return a decorator: the test runs for each device's kernels, with the examples and with drawn
    cases, `fewer` times fewer than usual."""

    def decorate(test: Callable[..., Any]) -> Any:
        for case in reversed(examples):
            test = example(case=case)(test)
        test = settings(max_examples=settings().max_examples // fewer)(given(case=cases)(test))
        return pytest.mark.device_kernels(EVERY_FOLDER(test))

    return decorate


def truth_args(op: OpUnderTest, case: Any, tensors: Tensors, backward: bool) -> tuple[Any, ...]:
    """Return the arguments in float64, in which the chunks are summed, too."""
    wide = {name: op_checks.in_float64(value) for name, value in tensors.items()}
    arguments = op.backward_args if backward else op.forward_args
    return arguments(replace(case, accumulate_narrow=False), wide)


def assert_gradients_match(
    op: OpUnderTest, folder: str, case: Any, tensors: Tensors,
    truths: Any, bounds: dict[str, float],
) -> None:  # fmt: skip
    """Check that gradients are within their bounds of the truth, and that two runs are equal."""
    args = op.backward_args(case, tensors)
    first, again = (run(op, folder, True, args) for _ in range(2))
    # The reference takes one chunk: its code that adds chunks is also that of the kernels.
    whole = op.backward_args(replace(case, chunk_bytes=None), tensors)
    references = library.OPS[op.backward_name].definition(*whole)
    for name, wanted, output, second, reference, truth in zip(
        op.gradients_of, case.mask, first, again, references, truths, strict=True
    ):
        label = f"{folder} d{name} of {case}"
        assert (output is not None) == wanted, label
        if wanted:
            assert torch.equal(output, second), f"{label}: two runs differ"
            bound = bounds[name] + torch.finfo(case.dtype).tiny
            assert_no_further(label, output, reference, truth, bound)


def logits_of(case: Any, tensors: Tensors) -> Tensor:
    """Compute the scaled and capped logits, with the LoRA, in float64."""
    names = ("x", "weight", "bias", "lora_x", "lora_b")
    x, weight, bias, lora_x, lora_b = (op_checks.in_float64(tensors[name]) for name in names)
    logits = F.linear(x, weight, bias)
    if lora_x is not None:
        logits = logits + F.linear(lora_x, lora_b)
    logits = logits * case.logit_scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    return logits / case.temperature


def rounding(case: Any, logits: Tensor) -> float:
    """Return how far rounding, of the logits to their dtype and in float32, may move a logit."""
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    # The head's and the LoRA's products are rounded one after the other.
    eps *= 1 if case.rank is None else 2
    size = max_abs(logits) + math.log(case.V) / case.temperature
    return (eps + 16 * eps32) * size


def assert_no_further(
    label: str, output: Tensor, reference: Tensor, truth: Tensor, roundings: float
) -> None:
    """Check that the error is at most twice the definition's in the same dtypes + `roundings`."""
    assert (output.shape, output.dtype) == (reference.shape, reference.dtype), label
    if truth.numel() == 0:
        return
    assert torch.equal(output.isnan(), truth.isnan()), label
    own = max_abs((reference.double() - truth).nan_to_num())
    error = max_abs((output.double() - truth).nan_to_num())
    assert error <= 2 * own + roundings, f"{label}: {error} of at most 2 * {own} + {roundings}"


def gradient_bounds(case: Any, tensors: Tensors, bounds: Tensor, terms: Tensor) -> dict[str, float]:
    """Compute the bounds of the errors of the head's gradients.

    bounds: (M, V), those of the gradient of the logits.
    terms: (M, V), the size of the terms of that gradient.
    """
    result = {"bias": max_abs(bounds.sum(0))}
    for rows, columns in (("x", "weight"), ("lora_x", "lora_b")):
        if tensors[rows] is None:
            continue
        x, weight = (tensors[name].double().abs() for name in (rows, columns))
        sums = 0.0
        if case.accumulate_narrow:
            # One rounding of the sum for each chunk, at most one a word.
            sums = torch.finfo(case.dtype).eps * case.V * max_abs(terms @ weight)
        result[rows] = max_abs(bounds @ weight) + sums
        result[columns] = max_abs(bounds.T @ x.reshape(-1, x.shape[-1]))
    return result
