"""linear_divergence's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
import op_checks
from head_bounds import (
    assert_gradients_match,
    assert_no_further,
    drawn,
    head_fields,
    implementation_of,
    run,
    truth_args,
)
from head_calls import Calls
from liger_ops import library
from linear_divergence_bounds import Bounds, logits_of, upstream
from linear_divergence_cases import INPUTS, TwoHeadsCase
from op_table import OPS
from op_under_test import EVERY_FOLDER, EVERY_IMPLEMENTATION, FOLDERS, INF, NAN, Tensors, max_abs

OP = OPS["linear_divergence_forward-mean"]
FORWARD, BACKWARD = (library.OPS[f"linear_divergence_{name}"] for name in ("forward", "backward"))
# Every option of the kernels, whole rows and rows in tiles, in several chunks.
FULL = TwoHeadsCase(
    shape=(7,), V=66, W=60, dtype=torch.float32, temperature=0.7, teacher_temperature=1.5,
    softcap=5.0, teacher_softcap=4.0, logit_scale=0.5, teacher_logit_scale=1.5, beta=0.3,
    soft_weight=0.7, hard_weight=0.4, token_weight=True, chunk_bytes=1100, return_entropy=True,
)  # fmt: skip
EXAMPLES = (
    FULL,
    replace(FULL, dtype=torch.bfloat16, kind="forward_kl", by_logits=True, reduction="none"),
    replace(FULL, dtype=torch.float16, W=70, kind="tvd", has_target=False, hard_weight=0.0),
)

# The same with a LoRA of each head.
ADAPTED = (
    replace(FULL, rank=3, teacher_rank=2),
    replace(FULL, dtype=torch.bfloat16, rank=8, teacher_rank=2, kind="tvd", reduction="none"),
)
# Of a teacher with so many more classes than the student that no kernel holds a row.
MORE_CLASSES = TwoHeadsCase(
    shape=(2,), V=64, W=5000, D=4, by_logits=True, has_target=False, reduction="none",
    chunk_bytes=None,
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> TwoHeadsCase:
    yes_or_no, softcaps = (True, False), (None, 5.0)
    fields = head_fields(
        draw, 3, D=(7, 4, 1), V=(7, 16, 33, 2, 1), W=(7, 16, 33, 2, 1), ignored=("some", "none"),
        teacher_dtype=(None, None, torch.float32, torch.bfloat16), teacher_bias=yes_or_no,
        by_logits=yes_or_no, has_target=yes_or_no, token_weight=yes_or_no, num_items=yes_or_no,
        reduction=("mean", "none", "sum"), kind=("jsd", "forward_kl", "reverse_kl", "tvd"),
        beta=(0.5, 0.1, 0.9, 0.0, 1.0), temperature=(1.0, 0.6, 2.5),
        teacher_temperature=(None, 0.7), teacher_softcap=softcaps, teacher_logit_scale=(1.0, 0.5),
        soft_weight=(1.0, 0.3, 0.0), hard_weight=(0.0, 0.5), teacher_rank=(None, None, 2),
    )  # fmt: skip
    case = TwoHeadsCase(**fields)
    least, beta = min(case.V, case.W), case.beta if case.kind == "jsd" else None
    # They are inf where the one side lacks classes of the other.
    limits = {"W": least} if case.kind == "forward_kl" or beta == 0 else {}
    limits |= {"V": least} if case.kind == "reverse_kl" or beta == 1 else {}
    return replace(
        case, **limits, num_items=case.num_items and case.reduction == "mean",
        hard_weight=case.hard_weight if case.has_target else 0.0,
    )  # fmt: skip


def written(case: TwoHeadsCase, z: Tensor, teacher_z: Tensor) -> Tensor:
    """The divergence of each token, from probabilities."""
    V = max(case.V, case.W)
    q = F.pad((z / case.temperature).softmax(-1), (0, V - case.V))
    teacher_temperature = case.teacher_temperature or case.temperature
    p = F.pad((teacher_z / teacher_temperature).softmax(-1), (0, V - case.W))
    kl = lambda a, b: (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(-1)
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(case.kind, case.beta)
    if case.kind == "tvd":
        return (p - q).abs().sum(-1) / 2
    if beta == 0:
        return kl(p, q)
    if beta == 1:
        return kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def reduced(case: TwoHeadsCase, tensors: Tensors, values: Tensor) -> Tensor:
    target, weights = tensors["target"], tensors["token_weight"]
    values = values.to(tensors["student_x"].device)
    weights = torch.ones_like(values) if weights is None else weights.double()
    if target is not None:
        weights = weights * (target != -100)
    weighted = (values * weights).reshape(case.shape)
    if case.reduction == "none":
        return weighted
    items = 1 if case.reduction == "sum" else weights.sum() or 1
    if tensors["num_items_in_batch"] is not None:
        items = tensors["num_items_in_batch"]
    return weighted.sum() / items


@given(case=cases())
@example(case=replace(EXAMPLES[0], reduction="sum"))
@example(case=EXAMPLES[1])
@example(case=EXAMPLES[2])
def test_the_definition_is_the_formula(case: TwoHeadsCase) -> None:
    """The composed op, with the gradients of its loss from the forward, and of all three results
    from the backward."""
    case = replace(case, rank=None, teacher_rank=None, mask=case.mask[:3])
    tensors = {name: op_checks.in_float64(x) for name, x in OP.tensors(case).items()}
    leaves = [tensors[name] for name in ("student_x", "student_weight", "student_bias")]
    leaves = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
    options = OP.options(replace(case, accumulate_narrow=False))
    ours = liger_ops.linear_divergence(*(tensors[name] for name in INPUTS), *options)
    z, teacher_z = logits_of(case, tensors)
    divergence = reduced(case, tensors, written(case, z, teacher_z))
    theirs = [case.soft_weight * divergence, divergence, None]
    if case.has_target:
        target = tensors["target"].reshape(-1).long()
        losses = F.cross_entropy(z.reshape(-1, case.V), target, reduction="none")
        theirs[2] = reduced(case, tensors, losses.reshape(case.shape))
        theirs[0] = theirs[0] + case.hard_weight * theirs[2]
    compare = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert (ours[2] is None) == (theirs[2] is None)
    weights = [None if y is None else torch.randn_like(y) for y in ours]
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            compare(a, b)
    if case.ignored == "some" and case.has_target and (tensors["target"] == -100).all():
        return
    for used in ((0,), (0, 1, 2)):
        sums = [
            sum((ys[i] * weights[i]).sum() for i in used if ys[i] is not None)
            for ys in (ours, theirs)
        ]
        grads = [torch.autograd.grad(total, leaves, retain_graph=True) for total in sums]
        for a, b in zip(*grads, strict=True):
            compare(a, b)


@drawn(cases(), *EXAMPLES, *ADAPTED, MORE_CLASSES, fewer=5)
def test_forward_matches_truth(folder: str, case: TwoHeadsCase) -> None:
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    outputs = run(OP, folder, False, args)
    references = FORWARD.definition(*args)
    truths = FORWARD.definition(*truth_args(OP, case, tensors, False))
    bounds = Bounds(case, tensors)
    divergence, loss, statistics = bounds.outputs()
    weights = reduced(replace(case, reduction="none"), tensors, torch.ones(case.shape).double())
    largest = max_abs(weights) if case.reduction == "none" else 1.0
    if case.reduction == "sum" or case.num_items:
        largest = float(weights.sum())
    mixed = case.soft_weight * divergence + case.hard_weight * loss
    errors = [largest * error for error in (mixed, divergence, loss)] + [statistics]
    errors += bounds.gradients(*upstream(case, tensors, True))
    for i, error in enumerate(errors):
        name = FORWARD.overload._schema.returns[i].name
        label = f"{folder} {name} of {case}"
        assert (outputs[i] is None) == (references[i] is None), label
        if outputs[i] is not None:
            assert_no_further(label, outputs[i], references[i], truths[i], error + 1e-12)


@drawn(cases(), FULL, fewer=2)
def test_the_entropy_matches_truth_and_changes_nothing_else(
    folder: str, case: TwoHeadsCase
) -> None:
    case = replace(case, return_entropy=True)
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    *others, found = FORWARD.kernels[folder](*args)
    z, _ = logits_of(case, tensors)
    log_q = (z / case.temperature).log_softmax(-1)
    truth = -(log_q.exp() * log_q).sum(-1)
    if case.has_target:
        truth = torch.where(tensors["target"] == -100, 0.0, truth)
    error = 2 * Bounds(case, tensors).logit / case.temperature * (1 + math.log(case.V))
    assert_no_further(f"{folder} {case}", found, FORWARD.definition(*args)[-1], truth, error)
    args = OP.forward_args(replace(case, return_entropy=False), tensors)
    *without, nothing = FORWARD.kernels[folder](*args)
    assert nothing is None
    for a, b in zip(others, without, strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num())


@drawn(cases(), *EXAMPLES, *ADAPTED, fewer=5)
def test_backward_matches_truth(folder: str, case: TwoHeadsCase) -> None:
    tensors = OP.tensors(case)
    truths = BACKWARD.definition(*truth_args(OP, case, tensors, True))
    bounds = Bounds(case, tensors).gradients(*upstream(case, tensors, False))
    bounds = dict(zip(OP.gradients_of, bounds, strict=False))
    assert_gradients_match(OP, folder, case, tensors, truths, bounds)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("case", EXAMPLES)
def test_the_forwards_gradients_are_the_backwards(folder: str, case: TwoHeadsCase) -> None:
    """Multiplied by the upstream gradient and the reduction's factor."""
    case = replace(case, reduction="mean", upstream=(True, False, False))
    tensors = OP.tensors(case)
    computed = FORWARD.kernels[folder](*OP.forward_args(case, tensors))[4:7]
    args = OP.backward_args(case, tensors)
    scaled = BACKWARD.kernels[folder](*args[:14], *computed, *args[17:])
    for a, b in zip(scaled[:3], BACKWARD.kernels[folder](*args)[:3], strict=True):
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(a, b, rtol=16 * eps, atol=16 * eps * max_abs(b))
        assert max_abs(b) > 0


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("classes", ((5, 8), (40, 33)))
def test_a_missing_class_has_probability_zero(folder: str, classes: tuple[int, int]) -> None:
    """A divergence from what is missing is inf, and has the gradient q - p; others are finite."""
    V, W = classes
    for softcap in (None, 6.0):
        case = TwoHeadsCase(shape=(3,), V=V, W=W, has_target=False, reduction="none",
                            kind="forward_kl" if W > V else "reverse_kl", hard_weight=0.0,
                            softcap=softcap, teacher_softcap=softcap)  # fmt: skip
        tensors = OP.tensors(case)
        outputs = FORWARD.kernels[folder](*OP.forward_args(case, tensors))
        assert bool((outputs[0] == INF).all())
        tensors.update(
            zip(("dloss", "statistics"), (torch.ones_like(outputs[0]), outputs[3]), strict=True)
        )
        tensors["ddivergence"] = None
        found = BACKWARD.kernels[folder](*OP.backward_args(case, tensors))
        if W > V:
            z, teacher_z = logits_of(case, tensors)
            slope = z.softmax(-1) - teacher_z.softmax(-1)[:, :V]
            if softcap is not None:
                slope = slope * (1 - (z / softcap).square())
            expected = slope @ tensors["student_weight"].double()
            torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)
        else:
            # The infinite terms are of classes that the student has.
            assert not found[0].isfinite().any()
        other = replace(case, kind="reverse_kl" if W > V else "forward_kl")
        assert FORWARD.kernels[folder](*OP.forward_args(other, tensors))[0].isfinite().all()


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_ignored_tokens_do_nothing(implementation: str) -> None:
    """Whatever is in their rows; if all are ignored, the mean and the gradients are 0."""
    for reduction in ("mean", "none"):
        case = replace(FULL, reduction=reduction, dtype=torch.float32)
        tensors = OP.tensors(case)
        tensors["target"][::2] = -100
        clean = {name: None if x is None else x.clone() for name, x in tensors.items()}
        for name in ("student_x", "teacher_x", "token_weight"):
            tensors[name][::2] = NAN
        results = []
        for values in (clean, tensors):
            args = OP.forward_args(replace(case, mask=(True, False, False)), values)
            outputs = implementation_of(FORWARD, implementation)(*args)
            values["statistics"] = outputs[3]
            back = OP.backward_args(replace(case, mask=(True, False, False)), values)
            results.append((*outputs[:5], implementation_of(BACKWARD, implementation)(*back)[0]))
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert torch.equal(a, b)
        assert bool((results[1][5][::2] == 0).all()) and bool((results[1][3][:, ::2] == 0).all())
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.full((3,), -100)
    loss, _, cross_entropy = liger_ops.linear_divergence(
        x, weight, teacher_logits=torch.randn(3, 5), target=target, hard_weight=1.0
    )
    assert loss == 0 and cross_entropy == 0
    loss.backward()
    assert bool((x.grad == 0).all()) and bool((weight.grad == 0).all())


def test_products_and_memory() -> None:
    """Three products of the student and one of the teacher for the loss alone, five with what is
    computed again, by words on a device; never the whole logits."""
    case = TwoHeadsCase(shape=(64,), V=64, W=48, D=4, dtype=torch.bfloat16,
                        chunk_bytes=16 * 64 * 4, hard_weight=0.5)  # fmt: skip
    for folder in ("definition", *FOLDERS):
        tensors = OP.tensors(case)
        by_words = 4 * 4 if folder == "definition" else 3 * 4 + 3
        for op, args, count in (
            (FORWARD, OP.forward_args(case, tensors), 4 * 4),
            # In 4 chunks of 16 words, of which the teacher has 3.
            (BACKWARD, OP.backward_args(case, tensors), by_words),
        ):
            with Calls() as calls:
                implementation_of(op, folder)(*args)
            products = [name for name, _ in calls.calls if name in ("aten::mm", "aten::addmm")]
            assert len(products) == count
            # The definition has float32 and int64 tensors of a chunk, a kernel one of each logits.
            largest = 8 if folder == "definition" else 2
            gradients, statistics = 64 * 4 * 4, 5 * 64 * 4
            assert calls.largest <= max(16 * 64 * largest, gradients, statistics)
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    results = liger_ops.linear_divergence(x, weight, torch.randn(8, 3), torch.randn(6, 3))
    for y, is_loss in ((results[0], True), (results[1], False)):
        with Calls() as calls:
            torch.autograd.grad(y, (x, weight), retain_graph=True)
        # The weight's gradient was handed over to the first backward.
        (args,) = calls.arguments("linear_divergence_backward")
        assert [gradient is not None for gradient in args[14:17]] == [is_loss, False, False]
        assert args[31][:2] == [True, not is_loss]


X, WEIGHT = torch.zeros(2, 3), torch.zeros(5, 3)
TEACHER = {
    "teacher_x": (2, 4), "teacher_weight": (5, 4), "teacher_bias": (5,), "teacher_lora_a": (4, 4),
    "teacher_lora_b": (5, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", TEACHER)
def test_the_teacher_is_a_constant(name: str) -> None:
    given = {each: torch.randn(shape, requires_grad=each == name)
             for each, shape in TEACHER.items()}  # fmt: skip
    with pytest.raises(ValueError, match=f"linear_divergence: {name} must not require a gradient"):
        liger_ops.linear_divergence(X, WEIGHT, **given)
    with torch.no_grad():
        liger_ops.linear_divergence(X, WEIGHT, **given)


def test_the_entropy_has_no_gradient() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    teacher = torch.randn(6, 5)
    given = {"teacher_logits": teacher, "target": torch.tensor([0, -100, 1, 2, 3, 4])}
    loss, *_, entropy = liger_ops.linear_divergence_forward(
        x, weight, **given, temperature=0.5, return_entropy=True
    )
    assert loss.requires_grad and not entropy.requires_grad
    expected = torch.distributions.Categorical(logits=F.linear(x, weight) / 0.5).entropy()
    torch.testing.assert_close(entropy, expected.detach() * (given["target"] != -100))
    torch.autograd.grad(loss, (x, weight))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("by_logits", (False, True))
def test_rows_of_the_weights_gradient_are_rounded_once(folder: str, by_logits: bool) -> None:
    """No tensor is larger than that gradient in its own dtype, and its rows do not depend on the
    number of chunks of words but by how products of two sizes round."""
    V, D = 512, 64
    found = []
    for chunk_bytes in (8 * 64 * 4, None):
        case = TwoHeadsCase(
            shape=(8,), V=V, W=384, D=D, dtype=torch.bfloat16, reduction="none", bias=False,
            by_logits=by_logits, kind="tvd", hard_weight=0.5, chunk_bytes=chunk_bytes,
            mask=(True, True, False),
        )  # fmt: skip
        args = OP.backward_args(case, OP.tensors(case))
        with Calls() as calls:
            dx, dweight, *_ = BACKWARD.kernels[folder](*args)
        found.append((dx, dweight))
        assert calls.largest == V * D * 2
    for few, one in zip(*found, strict=True):
        torch.testing.assert_close(few, one, rtol=2**-7, atol=2**-8 * max_abs(one))


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_frozen_weight_has_chunks_of_tokens(folder: str) -> None:
    """The gradient of x has no sum in float32."""
    case = TwoHeadsCase(
        shape=(32,), V=16, W=16, D=128, E=4, dtype=torch.bfloat16, reduction="none", bias=False,
        chunk_bytes=8 * 16 * 4, mask=(True, False, False),
    )  # fmt: skip
    args = OP.backward_args(case, OP.tensors(case))
    with Calls() as calls:
        dx, *others = BACKWARD.kernels[folder](*args)
    assert dx is not None and others == [None] * 4
    assert calls.largest == 32 * 128 * 2


def test_tokens_that_are_selected_before() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    teacher, target = torch.randn(6, 7), torch.tensor([0, -100, 3, -100, -100, 1])
    counts = target != -100
    results = []
    for kept in (slice(None), counts):
        given = {"teacher_logits": teacher[kept], "target": target[kept], "hard_weight": 0.5}
        loss, *_ = liger_ops.linear_divergence(x[kept], weight, **given, kind="tvd")
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    torch.testing.assert_close(*results)
