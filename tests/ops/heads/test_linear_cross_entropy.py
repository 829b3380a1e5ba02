"""linear_cross_entropy's kernels of both devices against float64 truth."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from cross_entropy_cases import TERM_CHOICES, of_terms
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
from head_calls import BACKWARD, FORWARD
from liger_ops import library
from liger_ops.ops.heads.linear_cross_entropy import upstream_of_tokens
from linear_cross_entropy_cases import UPSTREAM, WITHOUT_LORA, HeadCase, options_of
from op_checks import in_float64
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, Tensors, max_abs

OP = OPS["linear_cross_entropy_forward-mean"]
EXAMPLES = tuple(
    HeadCase(shape=(9,), dtype=dtype, chunk_bytes=22 * dtype.itemsize)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
)


@st.composite
def cases(draw: st.DrawFn) -> HeadCase:
    fields = head_fields(
        draw, 4, class_weight=(False, True), token_weight=(False, True), num_items=(False, True),
        reduction=("mean", "sum", "none"), temperature=(1.0,),
        **{name: values[:2] for name, values in TERM_CHOICES.items()},
    )  # fmt: skip
    return HeadCase(**fields | {"num_items": fields["num_items"] and fields["reduction"] == "mean"})


def gradient_roundings(case: HeadCase, tensors: Tensors) -> dict[str, float]:
    """Bound the change of each gradient by rounding the logits' gradient to x's dtype, by computing
    it in float32, where the terms of p_ic - (c == target_i) cancel, by two roundings of the logits
    of a LoRA, and by one of a sum per chunk if the sums are in the tensors' dtype."""
    rest = [tensors[n] for n in ("target", "class_weight", "token_weight", "num_items_in_batch")]
    upstream = [in_float64(tensors[name]) for name in UPSTREAM]
    options = options_of(case)[:6]
    logits = logits_of(replace(case, softcap=None, logit_scale=1.0), tensors)
    loss = library.OPS["cross_entropy_forward"].definition
    gradient = library.OPS["cross_entropy_backward"].definition
    _, _, lse, _, total, _, _, error = loss(logits, *rest, *options)

    def dlogits(*grads: Tensor | None) -> Tensor:
        given = (*grads, logits, *rest, lse, error, total, *options)
        return gradient(*given).abs().nan_to_num(0.0)

    call = SimpleNamespace(
        **dict(zip(UPSTREAM, upstream, strict=True)), lse=lse, reduction=case.reduction,
        total_weight=total, num_items_in_batch=rest[-1],
    )  # fmt: skip
    ones = torch.ones_like(lse)
    dloss, dz_loss, dlse, dtarget_logit = (
        torch.zeros_like(lse) if grad is None else grad.abs().reshape(lse.shape)
        for grad in upstream_of_tokens(call)
    )
    largest = math.prod(1 + max_abs(weights) for weights in rest[1:3])
    scales = largest * of_terms(case, dloss, dz_loss, lse.abs())
    scales = torch.where(rest[0] == -100, 0.0, scales + dtarget_logit) + dlse
    terms = dlogits(None, None, ones, None) + dlogits(None, None, None, ones)
    terms = (terms * scales.unsqueeze(-1)).reshape(-1, case.V)
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    relative = 16 * eps32 * (2 + lse.abs().reshape(-1, 1))
    if case.rank is not None:
        relative = relative + 4 * rounding(case, logits_of(case, tensors))
    bounds = 2 * eps * dlogits(*upstream).reshape(-1, case.V) + relative * terms
    found = gradient_bounds(replace(case, accumulate_narrow=False), tensors, bounds, terms)
    if case.accumulate_narrow:
        for rows, columns in (("x", "weight"), ("lora_x", "lora_b")):
            if tensors[rows] is not None:
                x = tensors[rows].double().abs()
                found[columns] += eps * len(terms) * max_abs(terms.T @ x.reshape(-1, x.shape[-1]))
    return found


@drawn(cases(), *EXAMPLES)
def test_forward_matches_truth(folder: str, case: HeadCase) -> None:
    """Every result, and the gradients that the forward computes, of the sum of the losses."""
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    outputs = run(OP, folder, False, args)
    references = FORWARD.definition(*args)
    truths = FORWARD.definition(*truth_args(OP, case, tensors, False))
    ones = torch.ones((), dtype=torch.float64, device=DEVICE)
    summed = {**tensors, **dict.fromkeys(UPSTREAM), "dloss": ones, "num_items_in_batch": None}
    roundings = gradient_roundings(replace(case, reduction="sum"), summed)
    results = (result.name for result in FORWARD.overload._schema.returns)
    for name, output, reference, truth in zip(results, outputs, references, truths, strict=True):
        label = f"{folder} {name} of {case}"
        if name[1:] in OP.gradients_of:
            wanted = case.reduction != "none" and case.mask[OP.gradients_of.index(name[1:])]
            assert (output is not None) == (reference is not None) == wanted, label
            if wanted:
                assert_no_further(label, output, reference, truth, roundings[name[1:]])
        elif name == "predicted_tokens":
            # Logits in x's dtype are equal where float64's are not.
            assert torch.equal(output, reference), label
        else:
            bound = 64 * torch.finfo(torch.float32).eps * (1 + max_abs(truth.nan_to_num(0.0)))
            assert_no_further(label, output, reference, truth, bound)


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
    tensors = OP.tensors(case)
    of_weights = [True, True, False, False, False]
    outputs = FORWARD.definition(*OP.forward_args(replace(case, mask=of_weights), tensors))
    tensors |= {**dict.fromkeys(UPSTREAM), "dloss": torch.tensor(0.37, device=DEVICE)}
    args = OP.backward_args(replace(case, mask=WITHOUT_LORA), tensors)
    computed = BACKWARD.arguments(*args)._replace(dx=outputs[8], dweight=outputs[9])
    found = run(OP, folder, True, tuple(computed))
    factor = 0.37 / (tensors["total_weight"].double() if reduction == "mean" else 1)
    factor = torch.where(tensors["total_weight"] == 0, 0.0, torch.as_tensor(factor))
    for gradient, computed_gradient in zip(found, outputs[8:10], strict=False):
        expected = (computed_gradient.double() * factor).to(dtype)
        torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(found[2], BACKWARD.definition(*args)[2])


@drawn(cases(), *EXAMPLES)
def test_backward_matches_truth(folder: str, case: HeadCase) -> None:
    tensors = OP.tensors(case)
    tensors |= {name: tensors[name] if wanted else None
                for name, wanted in zip(UPSTREAM, case.upstream, strict=True)}  # fmt: skip
    truths = BACKWARD.definition(*truth_args(OP, case, tensors, True))
    bounds = {name: 2 * bound for name, bound in gradient_roundings(case, tensors).items()}
    assert_gradients_match(OP, folder, case, tensors, truths, bounds)
