"""linear_divergence's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import liger_ops
import op_checks
from graphs import Recorder, liger_ops_of
from head_bounds import MOSTLY, assert_gradients_match, assert_no_further, run
from head_calls import Calls
from liger_ops import library
from linear_divergence_bounds import Bounds, logits_of, upstream
from linear_divergence_cases import INPUTS, TwoHeadsCase
from op_table import OPS
from op_under_test import FOLDERS, X_LAYOUTS, Tensors, max_abs

OP = OPS["linear_divergence_forward-mean"]
FORWARD, BACKWARD = (library.OPS[f"linear_divergence_{name}"] for name in ("forward", "backward"))
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
NAN, INF = float("nan"), float("inf")
# Every option of the kernels, whole rows and rows in tiles, in several chunks.
FULL = TwoHeadsCase(
    shape=(7,), V=66, W=60, dtype=torch.float32, temperature=0.7, teacher_temperature=1.5,
    softcap=5.0, teacher_softcap=4.0, logit_scale=0.5, teacher_logit_scale=1.5, beta=0.3,
    soft_weight=0.7, hard_weight=0.4, token_weight=True, chunk_bytes=1100,
)  # fmt: skip
EXAMPLES = (
    FULL,
    replace(FULL, dtype=torch.bfloat16, kind="forward_kl", by_logits=True, reduction="none"),
    replace(FULL, dtype=torch.float16, W=70, kind="tvd", has_target=False, hard_weight=0.0),
)


# Of a teacher with so many more classes than the student that no kernel holds a row.
MORE_CLASSES = TwoHeadsCase(
    shape=(2,), V=64, W=5000, D=4, by_logits=True, has_target=False, reduction="none",
    chunk_bytes=None,
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> TwoHeadsCase:
    """Mostly of several chunks, with all gradients."""
    bias, has_target = draw(st.booleans()), draw(MOSTLY)
    mask = tuple(draw(MOSTLY) for _ in range(3))
    V, W = (draw(st.sampled_from((7, 16, 33, 2, 1))) for _ in range(2))
    kind = draw(st.sampled_from(("jsd", "forward_kl", "reverse_kl", "tvd")))
    beta = draw(st.sampled_from((0.5, 0.1, 0.9, 0.0, 1.0)))
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        # They are inf where the one side lacks classes of the other.
        W = min(V, W)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        V = min(V, W)
    reduction = draw(st.sampled_from(("mean", "none", "sum")))
    return TwoHeadsCase(
        shape=draw(st.sampled_from(((5,), (2, 3), (3, 1, 2), (1,), (), (0,)))),
        D=draw(st.sampled_from((7, 4, 1))),
        V=V,
        W=W,
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        teacher_dtype=draw(st.sampled_from((None, None, torch.float32, torch.bfloat16))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from((*X_LAYOUTS, "expanded"))),
        bias=bias,
        teacher_bias=draw(st.booleans()),
        by_logits=draw(st.booleans()),
        has_target=has_target,
        token_weight=draw(st.booleans()),
        num_items=reduction == "mean" and draw(st.booleans()),
        ignored=draw(st.sampled_from(("some", "some", "none"))),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        reduction=reduction,
        kind=kind,
        beta=beta,
        temperature=draw(st.sampled_from((1.0, 0.6, 2.5))),
        teacher_temperature=draw(st.sampled_from((None, 0.7))),
        softcap=draw(st.sampled_from((None, 5.0))),
        teacher_softcap=draw(st.sampled_from((None, 6.0))),
        logit_scale=draw(st.sampled_from((1.0, 0.25))),
        teacher_logit_scale=draw(st.sampled_from((1.0, 0.5))),
        soft_weight=draw(st.sampled_from((1.0, 0.3, 0.0))),
        hard_weight=draw(st.sampled_from((0.0, 0.5))) if has_target else 0.0,
        accumulate_narrow=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from((60, 400, 1, None))),
        scale=draw(st.sampled_from((1.0, 0.05, 4.0))),
        mask=(*mask[:2], mask[2] and bias),
        upstream=tuple(draw(MOSTLY) for _ in range(3)),
        seed=draw(st.integers(0, 2**31)),
    )


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
    tensors = {
        name: x if x is None or not x.is_floating_point() else x.detach().double()
        for name, x in OP.tensors(case).items()
    }
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


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 5)
@given(case=cases())
@example(case=EXAMPLES[0])
@example(case=EXAMPLES[1])
@example(case=EXAMPLES[2])
@example(case=MORE_CLASSES)
def test_forward_matches_truth(folder: str, case: TwoHeadsCase) -> None:
    tensors = OP.tensors(case)
    args = OP.forward_args(case, tensors)
    outputs = run(OP, folder, False, args)
    references = FORWARD.definition(*args)
    wide = (*op_checks.widened(args[:10]), *args[10:22], None, *args[23:])
    truths = FORWARD.definition(*wide)
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


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 5)
@given(case=cases())
@example(case=EXAMPLES[0])
@example(case=EXAMPLES[1])
@example(case=EXAMPLES[2])
def test_backward_matches_truth(folder: str, case: TwoHeadsCase) -> None:
    tensors = OP.tensors(case)
    args = OP.backward_args(replace(case, chunk_bytes=None), tensors)
    wide = (*op_checks.widened(args[:17]), *args[17:29], None, *args[30:])
    truths = BACKWARD.definition(*wide)
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
@pytest.mark.parametrize("implementation", ("definition", *FOLDERS))
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
            found = [
                op.definition if implementation == "definition" else op.kernels[implementation]
                for op in (FORWARD, BACKWARD)
            ]
            outputs = found[0](*args)
            values["statistics"] = outputs[3]
            back = OP.backward_args(replace(case, mask=(True, False, False)), values)
            results.append((*outputs[:5], found[1](*back)[0]))
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
                (op.definition if folder == "definition" else op.kernels[folder])(*args)
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


def test_compiled_once_for_unbacked_sizes() -> None:
    recorder = Recorder()

    def model(x: Tensor, weight: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        kept = target > 0
        loss, *_ = torch.ops.liger.linear_divergence(
            x[kept], weight, teacher_logits=teacher[kept], target=target[target > 0],
            hard_weight=0.5, chunk_bytes=60,
        )  # fmt: skip
        return loss * 2

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (4, 6):
            leaves = [torch.randn(n, 5, requires_grad=True) for n in (rows, 7)]
            args = (*leaves, torch.randn(rows, 8), torch.arange(rows))
            values = [f(*args) for f in (compiled, model)]
            torch.testing.assert_close(*values)
            grads = [torch.autograd.grad(value, leaves) for value in values]
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b)
    assert liger_ops_of(recorder.forwards) == {"linear_divergence_forward": 1}
    assert liger_ops_of(recorder.backwards) == {"linear_divergence_backward": 1}


def test_autocast_casts_as_a_linear_layer() -> None:
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (3, 5))
    teacher_x, teacher_weight = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = liger_ops.linear_divergence(x, weight, teacher_x, teacher_weight)[0]
        theirs = liger_ops.divergence(F.linear(x, weight), F.linear(teacher_x, teacher_weight))
    torch.testing.assert_close(ours, theirs.mean())
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(ours, (x, weight)))


X, WEIGHT = torch.zeros(2, 3), torch.zeros(5, 3)
TARGET = torch.zeros(2, dtype=torch.int64)
TEACHER = {"teacher_logits": torch.zeros(2, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"teacher_logits": None}, "the teacher must be given by teacher_logits or by teacher_x"),
        ({"teacher_x": X}, "not both, got teacher_x beside teacher_logits"),
        ({"teacher_logits": None, "teacher_x": X}, "teacher_weight, got teacher_x"),
        ({"teacher_logits": torch.zeros(3, 6)}, "teacher_logits must have the shape of student_x"),
        ({"teacher_logits": torch.zeros(2, 0)}, "teacher_logits must have at least one class"),
        ({"student_weight": torch.zeros(5, 4)}, "student_weight must have the shape of (V, D) for"),
        ({"target": None, "hard_weight": 1.0}, "hard_weight must be 0 without a target, got 1.0"),
        ({"soft_weight": -1.0}, "soft_weight must be a number of at least 0, got -1.0"),
        ({"hard_weight": NAN}, "hard_weight must be a number of at least 0, got nan"),
        ({"temperature": 0.0}, "temperature must be a number above 0, got 0.0"),
        ({"student_softcap": 0.0}, "student_softcap must be a number above 0, got 0.0"),
        ({"teacher_logit_scale": INF}, "teacher_logit_scale must be a number above 0, got inf"),
        ({"kind": "kl"}, "kind must be one of 'forward_kl', 'reverse_kl', 'jsd', 'tvd', 'cosine'"),
        ({"beta": 2.0}, "beta must be from 0 to 1, got 2.0"),
        ({"reduction": "batchmean"}, "reduction must be one of"),
        ({"token_weight": torch.zeros(3)}, "token_weight must have the shape of target, (2,)"),
        ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None"),
        ({"chunk_bytes": 0}, "chunk_bytes must be above 0 or None, got 0"),
    ),
)  # fmt: skip
def test_rejects(change: dict[str, Any], message: str) -> None:
    given = {"student_x": X, "student_weight": WEIGHT, "target": TARGET, **TEACHER, **change}
    with pytest.raises(ValueError) as error:
        liger_ops.linear_divergence(**given)
    assert str(error.value).startswith("linear_divergence: ") and message in str(error.value)
    options = {name: value for name, value in change.items() if not isinstance(value, Tensor)}
    # The module has no tensors.
    if options.keys().isdisjoint(("target", "teacher_logits", "accum_dtype")) and options == change:
        with pytest.raises(ValueError, match="linear_divergence: "):
            liger_ops.nn.LinearDivergence(**options)


@pytest.mark.parametrize("name", ("teacher_x", "teacher_weight", "teacher_bias"))
def test_the_teacher_is_a_constant(name: str) -> None:
    given = {"teacher_x": torch.randn(2, 4), "teacher_weight": torch.randn(5, 4),
             "teacher_bias": torch.randn(5)}  # fmt: skip
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"linear_divergence: {name} must not require a gradient"):
        liger_ops.linear_divergence(X, WEIGHT, **given)
    with torch.no_grad():
        liger_ops.linear_divergence(X, WEIGHT, **given)


def test_the_module_and_the_documentation() -> None:
    text = liger_ops.linear_divergence.__doc__
    assert all(part in text for part in ("Args:", "Returns:", "Raises:", "Source:", "Example:"))
    x, weight, bias, teacher = (torch.randn(size) for size in ((3, 8), (5, 8), (5,), (3, 6)))
    target = torch.tensor([0, -1, 2])
    module = liger_ops.nn.LinearDivergence(
        "tvd", temperature=0.5, hard_weight=0.5, ignore_index=-1, chunk_bytes=64
    )
    ours = module(x, weight, teacher_logits=teacher, student_bias=bias, target=target)
    long = F.pad(F.linear(x, weight, bias), (0, 1), value=-INF)
    tvd = liger_ops.divergence(long, teacher, "tvd", 0.5, 0.5, None, target, -1).sum() / 2
    hard = F.cross_entropy(F.linear(x, weight, bias), target, ignore_index=-1)
    for a, b in zip(ours, (tvd + hard / 2, tvd, hard), strict=True):
        torch.testing.assert_close(a, b)
    assert repr(module) == (
        "LinearDivergence(kind='tvd', temperature=0.5, hard_weight=0.5, ignore_index=-1,"
        " chunk_bytes=64)"
    )
