"""linear_cross_entropy's kernels of both devices against float64 truth."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from head_calls import BACKWARD, FORWARD
from liger_ops import library
from liger_ops.ops.heads.linear_cross_entropy import upstream_of_tokens
from linear_cross_entropy_cases import (
    NOT_COMPUTED,
    WITHOUT_LORA,
    HeadCase,
    options_of,
    tensors_of,
)
from op_checks import (
    assert_allocated_as_meta,
    assert_own_memory,
    assert_unchanged,
    clones,
    poisoned_memory,
    widened,
)
from op_under_test import DEVICE, FOLDERS, X_LAYOUTS, Values, max_abs

EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
OUTPUTS = [result.name for result in FORWARD.overload._schema.returns]
GRADIENTS = ("dx", "dweight", "dbias", "dlora_x", "dlora_b")
MOSTLY = st.sampled_from((True, True, True, False))


@st.composite
def cases(draw: st.DrawFn) -> HeadCase:
    """Mostly of several chunks, with all gradients."""
    flags = st.booleans()
    bias, reduction = draw(flags), draw(st.sampled_from(("mean", "sum", "none")))
    mask = tuple(draw(MOSTLY) for _ in range(3))
    return HeadCase(
        shape=draw(st.sampled_from(((9,), (2, 3), (5,), (3, 1, 2), (1,), (), (0,), (2, 0)))),
        D=draw(st.sampled_from((7, 4, 16, 1))),
        V=draw(st.sampled_from((7, 16, 33, 130, 2, 1))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        bias=bias,
        class_weight=draw(flags),
        token_weight=draw(flags),
        num_items=reduction == "mean" and draw(flags),
        ignored=draw(st.sampled_from(("some", "some", "none", "all"))),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        reduction=reduction,
        label_smoothing=draw(st.sampled_from((0.0, 0.1))),
        lse_square_scale=draw(st.sampled_from((0.0, 1e-2))),
        softcap=draw(st.sampled_from((None, 5.0))),
        logit_scale=draw(st.sampled_from((1.0, 0.25))),
        accumulate_narrow=draw(flags),
        rows=draw(st.sampled_from((2, 4, 1, None))),
        scale=draw(st.sampled_from((1.0, 0.05, 4.0))),
        mask=(*mask[:2], mask[2] and bias),
        upstream=tuple(draw(MOSTLY) for _ in range(4)),
        seed=draw(st.integers(0, 2**31)),
    )


def chunked_options(case: HeadCase, folder: str) -> list[Any]:
    return options_of(case, -(-case.V // 16) * 16 if folder == "cuda" else None)


def run_kernel(op: library.Op, folder: str, args: list[Any]) -> tuple[Tensor | None, ...]:
    before = clones(tuple(args))
    with poisoned_memory():
        outputs = op.kernels[folder](*args)
    assert_unchanged(tuple(args), before)
    assert_own_memory(tuple(args), outputs)
    return outputs


def gradient_roundings(args: list[Any], upstream: list[Tensor | None]) -> dict[str, float]:
    """What rounding the gradient of the logits to x's dtype may change each gradient by, and
    computing it in float32, where the terms of p_ic - (c == target_i) cancel."""
    x, weight, target, bias, class_weight, token_weight, num_items, *options = args
    wide_x, wide_weight, wide_bias = widened((x, weight, bias))
    rest = (target, class_weight, token_weight, num_items)
    logits = F.linear(wide_x, wide_weight, wide_bias)
    loss = library.OPS["cross_entropy_forward"].definition
    gradient = library.OPS["cross_entropy_backward"].definition
    _, _, lse, _, total, _, _, error = loss(logits, *rest, *options[:6])

    def dlogits(*grads: Tensor | None) -> Tensor:
        return (
            gradient(*grads, logits, *rest, lse, error, total, *options[:6]).abs().nan_to_num(0.0)
        )

    names = ("dloss", "dz_loss", "dlse", "dtarget_logit")
    call = SimpleNamespace(
        **dict(zip(names, upstream, strict=True)), lse=lse, reduction=options[1],
        total_weight=total, num_items_in_batch=num_items,
    )  # fmt: skip
    ones = torch.ones_like(lse)
    dloss, dz_loss, dlse, dtarget_logit = (
        torch.zeros_like(lse) if grad is None else grad.abs().reshape(lse.shape)
        for grad in upstream_of_tokens(call)
    )
    largest = math.prod(1 + max_abs(weights) for weights in (class_weight, token_weight))
    scales = largest * (dloss + (dloss + dz_loss) * 2 * options[3] * lse.abs())
    scales = torch.where(target == -100, 0.0, scales + dtarget_logit) + dlse
    terms = dlogits(None, None, ones, None) + dlogits(None, None, None, ones)
    terms = terms * (scales * (2 + lse.abs())).unsqueeze(-1)
    eps, eps32 = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps
    bounds = (2 * eps * dlogits(*upstream) + 16 * eps32 * terms).reshape(-1, weight.shape[0])
    return {
        "dx": max_abs(bounds @ wide_weight.abs()),
        "dweight": max_abs(bounds.T @ wide_x.abs().reshape(-1, x.shape[-1])),
        "dbias": max_abs(bounds.sum(0)),
    }


def assert_no_further(
    label: str, output: Tensor, reference: Tensor, truth: Tensor, roundings: float
) -> None:
    """No further from truth than twice the definition in the same dtypes, and a few roundings."""
    assert (output.shape, output.dtype) == (reference.shape, reference.dtype), label
    if truth.numel() == 0:
        return
    assert torch.equal(output.isnan(), truth.isnan()), f"{label}: NaN is not where it should be"
    output, reference, truth = (t.double().nan_to_num(0.0) for t in (output, reference, truth))
    own = max_abs(reference - truth)
    error = max_abs(output - truth)
    assert error <= 2 * own + roundings, f"{label}: {error} of at most 2 * {own} + {roundings}"


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=cases())
@example(case=HeadCase(shape=(9,), dtype=torch.float32, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.bfloat16, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.float16, rows=2))
def test_forward_matches_truth(folder: str, case: HeadCase) -> None:
    """Every result, and the gradients that the forward computes, of the sum of the losses."""
    tensors, options = tensors_of(case), chunked_options(case, folder)
    mask = [wanted and case.reduction != "none" for wanted in case.mask]
    args = [*tensors, *options, True, True, mask]
    outputs = run_kernel(FORWARD, folder, args)
    references = FORWARD.definition(*args)
    wide = list(widened(tuple(args)))
    wide[13] = None
    truths = FORWARD.definition(*wide)
    eps32 = torch.finfo(torch.float32).eps
    ones = torch.ones((), dtype=torch.float64, device=DEVICE)
    summed = [*args[:8], "sum", *args[9:]]
    summed[6] = None
    roundings = gradient_roundings(summed, [ones, None, None, None])
    for name, output, reference, truth in zip(OUTPUTS, outputs, references, truths, strict=True):
        label = f"{folder} {name} of {case}"
        if name in GRADIENTS:
            wanted = mask[GRADIENTS.index(name)]
            assert (output is not None) == (reference is not None) == wanted, label
            if wanted:
                assert_no_further(label, output, reference, truth, roundings[name])
        elif name == "predicted_tokens":
            # Logits in x's dtype are equal where float64's are not.
            assert torch.equal(output, reference), label
        else:
            bound = 64 * eps32 * (1 + max_abs(truth.nan_to_num(0.0)))
            assert_no_further(label, output, reference, truth, bound)
    overload = type("Overload", (), {"overload": lambda self, backward: FORWARD.overload})()
    assert_allocated_as_meta(overload, False, tuple(args), outputs)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("ignored", ("some", "all"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_backward_of_what_the_forward_computed(
    folder: str, dtype: torch.dtype, ignored: str, reduction: str
) -> None:
    """Multiplied in float32 and rounded once; what was not computed is made anew."""
    case = HeadCase(shape=(5, 3), V=37, D=19, dtype=dtype, ignored=ignored, reduction=reduction)
    tensors, options = tensors_of(case), chunked_options(case, folder)
    outputs = FORWARD.definition(
        *tensors, *options, False, False, [True, True, False, False, False]
    )
    lse, total_weight, error, dx, dweight = outputs[2], outputs[4], *outputs[7:10]
    dloss = torch.tensor(0.37, device=DEVICE)
    args = [dloss, None, None, None, *tensors, lse, error, total_weight]
    found = run_kernel(BACKWARD, folder, [*args, dx, dweight, None, *options, WITHOUT_LORA])
    factor = dloss.double() / (total_weight.double() if reduction == "mean" else 1)
    factor = torch.where(total_weight == 0, 0.0, factor)
    for gradient, computed in zip(found, (dx, dweight), strict=False):
        expected = (computed.double() * factor).to(dtype)
        torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtype).eps, atol=0)
    expected = BACKWARD.definition(
        *args, *NOT_COMPUTED, *options, [False, False, True, False, False]
    )[2]
    torch.testing.assert_close(found[2], expected)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=cases())
@example(case=HeadCase(shape=(9,), dtype=torch.float32, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.bfloat16, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.float16, rows=2))
def test_backward_matches_truth(folder: str, case: HeadCase) -> None:
    tensors, options = tensors_of(case), chunked_options(case, folder)
    outputs = FORWARD.definition(*tensors, *options, False, False, [False] * 5)
    values = Values(case.seed + 1)
    upstream = [
        torch.randn(output.shape, generator=values.generator).to(DEVICE) if wanted else None
        for output, wanted in zip(outputs[:4], case.upstream, strict=True)
    ]
    lse, total_weight, error = outputs[2], outputs[4], outputs[7]
    args = [*upstream, *tensors, lse, error, total_weight, *NOT_COMPUTED, *options, list(case.mask)]
    gradients = run_kernel(BACKWARD, folder, args)
    references = BACKWARD.definition(*args)
    wide = list(widened(tuple(args)))
    wide[23] = None
    truths = BACKWARD.definition(*wide)
    roundings = gradient_roundings([*tensors, *options], list(widened(tuple(upstream))))
    for name, wanted, output, reference, truth in zip(
        GRADIENTS, case.mask, gradients, references, truths, strict=True
    ):
        label = f"{folder} {name} of {case}"
        assert (output is not None) == wanted, label
        if wanted:
            bound = 2 * roundings[name] + torch.finfo(case.dtype).tiny
            assert_no_further(label, output, reference, truth, bound)
