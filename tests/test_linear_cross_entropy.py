"""linear_cross_entropy against float64 truth, and against torch.nn.functional."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import liger_ops
import simulated_npu
from graphs import Recorder, liger_ops_of
from heads import NOT_COMPUTED, HeadCase, options_of, tensors_of
from liger_ops import library
from liger_ops.lowering.linear_cross_entropy import Gradients, head_of
from liger_ops.nn import CrossEntropyOutput, LinearCrossEntropyLoss
from liger_ops.ops.chunks import ENVIRONMENT, chunks
from liger_ops.ops.head import upstream_of_tokens, waiting_weight_dtype
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
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16)
)
FORWARD = library.OPS["linear_cross_entropy_forward"]
BACKWARD = library.OPS["linear_cross_entropy_backward"]
OUTPUTS = [result.name for result in FORWARD.overload._schema.returns]
GRADIENTS = ("dx", "dweight", "dbias")
MASKS = list(itertools.product((False, True), repeat=3))


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
    _, _, lse, _, total, _, _ = loss(logits, *rest, *options[:6])

    def dlogits(*grads: Tensor | None) -> Tensor:
        return gradient(*grads, logits, *rest, lse, total, *options[:6]).abs().nan_to_num(0.0)

    ones = torch.ones_like(lse)
    dloss, dz_loss, dlse, dtarget_logit = (
        torch.zeros_like(lse) if grad is None else grad.abs().reshape(lse.shape)
        for grad in upstream_of_tokens(*upstream, lse, options[1], total, num_items)
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
    outputs = FORWARD.definition(*tensors, *options, False, False, [True, True, False])
    lse, total_weight, dx, dweight = outputs[2], outputs[4], outputs[7], outputs[8]
    dloss = torch.tensor(0.37, device=DEVICE)
    args = [dloss, None, None, None, *tensors, lse, total_weight]
    found = run_kernel(BACKWARD, folder, [*args, dx, dweight, None, *options, [True] * 3])
    factor = dloss.double() / (total_weight.double() if reduction == "mean" else 1)
    factor = torch.where(total_weight == 0, 0.0, factor)
    for gradient, computed in zip(found, (dx, dweight), strict=False):
        expected = (computed.double() * factor).to(dtype)
        torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtype).eps, atol=0)
    expected = BACKWARD.definition(*args, *NOT_COMPUTED, *options, [False, False, True])[2]
    torch.testing.assert_close(found[2], expected)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=cases())
@example(case=HeadCase(shape=(9,), dtype=torch.float32, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.bfloat16, rows=2))
@example(case=HeadCase(shape=(9,), dtype=torch.float16, rows=2))
def test_backward_matches_truth(folder: str, case: HeadCase) -> None:
    tensors, options = tensors_of(case), chunked_options(case, folder)
    outputs = FORWARD.definition(*tensors, *options, False, False, [False] * 3)
    values = Values(case.seed + 1)
    upstream = [
        torch.randn(output.shape, generator=values.generator).to(DEVICE) if wanted else None
        for output, wanted in zip(outputs[:4], case.upstream, strict=True)
    ]
    _, _, lse, _, total_weight, *_ = outputs
    args = [*upstream, *tensors, lse, total_weight, *NOT_COMPUTED, *options, list(case.mask)]
    gradients = run_kernel(BACKWARD, folder, args)
    references = BACKWARD.definition(*args)
    wide = list(widened(tuple(args)))
    wide[22] = None
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


@given(
    M=st.integers(0, 5000), row_bytes=st.integers(1, 5000), chunk_bytes=st.integers(1, 10_000_000)
)
def test_chunks_cover_the_rows_within_the_budget(M: int, row_bytes: int, chunk_bytes: int) -> None:
    slices = list(chunks(M, row_bytes, chunk_bytes))
    assert [row for s in slices for row in range(s.start, s.stop)] == list(range(M))
    sizes = [s.stop - s.start for s in slices]
    fitting = max(1, chunk_bytes // row_bytes)
    assert max(sizes) <= fitting
    assert len(set(sizes[:-1])) <= 1
    if len(sizes) > 1 and fitting >= 128:
        assert sizes[0] % 128 == 0
        fitting -= fitting % 128
    assert len(sizes) <= max(1, math.ceil(M / fitting))


def test_the_environment_gives_the_chunks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert [s.stop for s in chunks(2**18, 4096, None)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**20)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**30)] == [2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**29)] == [2**18]
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**29 - 1)] == [2**17, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, 2**29, 0, 2**29)] == [2**17, 2**18]
    monkeypatch.setenv(ENVIRONMENT, str(2**28))
    assert [s.stop for s in chunks(2**18, 4096, None, 0, 2**30)] == [2**16 * i for i in range(1, 5)]
    assert [s.stop for s in chunks(2**18, 4096, None, 2**30)] == [2**16, 2**17, 3 * 2**16, 2**18]
    assert [s.stop for s in chunks(2**18, 4096, 2**30)] == [2**18]
    for value in ("", "0", "-1", "1GB"):
        monkeypatch.setenv(ENVIRONMENT, value)
        with pytest.raises(ValueError, match=f"{ENVIRONMENT} must be a number of bytes above 0"):
            list(chunks(1, 1, None))


@pytest.mark.parametrize(
    ("M", "D", "dtype", "accum_dtype", "count"),
    (
        # With a sum: 1002 MiB of it, 512 of a chunk, less the gradient that is not there yet.
        (4096, 2048, torch.bfloat16, None, 1),
        (8192, 2048, torch.bfloat16, None, 4),
        (8192, 4096, torch.bfloat16, None, 1),
        (8320, 4096, torch.bfloat16, None, 3),
        (8192, 4096, torch.bfloat16, torch.float32, 2),
        (8192, 4096, torch.bfloat16, torch.bfloat16, 4),
        (4096, 2048, torch.float16, None, 2),
        (4096, 2048, torch.float32, None, 4),
    ),
)
def test_one_chunk_where_it_takes_no_more_than_several_and_their_sum(
    M: int, D: int, dtype: torch.dtype, accum_dtype: torch.dtype | None, count: int
) -> None:
    x = torch.empty(M, D, dtype=dtype, device="meta")
    weight = torch.empty(128256, D, dtype=dtype, device="meta")
    dweight = torch.empty_like(weight, dtype=waiting_weight_dtype(weight, accum_dtype))
    head = head_of(x, weight, None, dweight, 16, accum_dtype, None)
    assert len(head.slices) == count
    # A float16 gradient waits in float32.
    total = Gradients(head, None, dweight, None, accum_dtype).dweight
    in_place = count == 1 or dtype is not torch.bfloat16 or accum_dtype is torch.bfloat16
    assert (total is dweight) == in_place
    assert in_place or total.dtype is torch.float32


def leaves(case: HeadCase) -> tuple[list[Any], list[Tensor]]:
    """x, weight and bias requiring gradients, in the arguments of the op and by themselves."""
    args = [*tensors_of(case), *options_of(case)]
    for i in (0, 1, 3):
        if args[i] is not None:
            args[i] = args[i].detach().clone().requires_grad_()
    return args, [args[i] for i in (0, 1, 3) if args[i] is not None]


def call(args: list[Any]) -> Tensor:
    return liger_ops.linear_cross_entropy(*args)


def unfused(args: list[Any]) -> Tensor:
    """What PyTorch has of the options."""
    x, weight, target, bias, class_weight, _, _, ignore_index, reduction, label_smoothing = args[
        :10
    ]
    logits = F.linear(x, weight, bias).float() if x.dtype is not torch.float64 else None
    logits = F.linear(x, weight, bias) if logits is None else logits
    loss = F.cross_entropy(
        logits.reshape(-1, weight.shape[0]),
        target.reshape(-1).long(),
        None if class_weight is None else class_weight.to(logits.dtype),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


@EVERY_DTYPE
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("class_weight", (False, True))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.2))
def test_agrees_with_aten(
    dtype: torch.dtype, reduction: str, bias: bool, class_weight: bool, label_smoothing: float
) -> None:
    case = HeadCase(
        shape=(2, 30),
        V=101,
        dtype=dtype,
        bias=bias,
        class_weight=class_weight,
        reduction=reduction,
        label_smoothing=label_smoothing,
        rows=7,
    )
    args, tensors = leaves(case)
    ours, theirs = call(args), unfused(args)
    upstream = torch.rand_like(theirs)
    bounds: dict[str, Any] = {}
    if dtype.itemsize == 2:
        bounds = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        if reduction != "mean":
            bounds["atol"] *= 8
    torch.testing.assert_close(ours, theirs, check_dtype=dtype is torch.float64)
    assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    for a, b in zip(
        torch.autograd.grad(ours, tensors, upstream),
        torch.autograd.grad(theirs, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **bounds)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@EVERY_DTYPE
def test_the_number_of_chunks_does_not_matter(dtype: torch.dtype, reduction: str) -> None:
    case = HeadCase(shape=(33,), dtype=dtype, reduction=reduction, ignored="none")
    results = []
    for rows in (None, 1, 4, 32):
        args, tensors = leaves(case)
        args[14] = rows and rows * case.V * dtype.itemsize
        loss = call(args)
        grads = torch.autograd.grad(loss, tensors, torch.ones_like(loss))
        results.append((loss, *grads))
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("mask", MASKS)
def test_gradient_present_exactly_when_required(reduction: str, mask: tuple[bool, ...]) -> None:
    """Each gradient is that of all, and the forward is asked for no other."""
    args, tensors = leaves(HeadCase(reduction=reduction, dtype=torch.float64))
    expected = torch.autograd.grad(call(args).sum(), tensors)
    for tensor, wanted in zip(tensors, mask, strict=True):
        tensor.requires_grad_(wanted)
    with Calls() as calls:
        loss = call(args).sum()
        assert loss.requires_grad == any(mask)
        if any(mask):
            loss.backward()
    in_forward = [wanted and reduction != "none" for wanted in mask]
    assert calls.masks("linear_cross_entropy_forward") == [in_forward]
    recomputes = reduction == "none" and any(mask)
    assert calls.recomputed() == ([list(mask)] if recomputes else [])
    for tensor, wanted, gradient in zip(tensors, mask, expected, strict=True):
        assert (tensor.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(tensor.grad, gradient)


class Calls(TorchDispatchMode):
    """The ops that reach the dispatcher, and the bytes of the largest tensor that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func._schema.name, list(args)))
        if func is torch.ops.liger.linear_cross_entropy.default:
            # In inference mode nothing before this has taken it apart.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor):
                self.largest = max(self.largest, output.untyped_storage().nbytes())
        return outputs

    def arguments(self, op: str) -> list[list[Any]]:
        return [args for name, args in self.calls if name == f"liger::{op}"]

    def masks(self, op: str) -> list[list[bool]]:
        """The masks given; the dispatcher drops an argument that is the default."""
        n = len(library.OPS[op].overload._schema.arguments)
        return [list(args[-1]) if len(args) == n else [False] * 3 for args in self.arguments(op)]

    def recomputed(self) -> list[list[bool]]:
        """Of each backward that computes logits again, which gradients it does it for."""
        missing = [
            [
                wanted and gradient is None
                for wanted, gradient in zip(args[-1], args[13:16], strict=True)
            ]
            for args in self.arguments("linear_cross_entropy_backward")
        ]
        return [mask for mask in missing if any(mask)]


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_without_gradients_none_is_computed(context: Callable[[], Any]) -> None:
    args, _ = leaves(HeadCase())
    with context(), Calls() as calls:
        loss = call(args)
    assert not loss.requires_grad
    assert calls.masks("linear_cross_entropy_forward") == [[False] * 3]
    with torch.no_grad():
        *_, dx, dweight, dbias = FORWARD.definition(*args)
    assert dx is dweight is dbias is None


def test_a_reentrant_checkpoint_computes_gradients_in_its_second_pass_alone() -> None:
    args, tensors = leaves(HeadCase())
    expected = torch.autograd.grad(call(args), tensors)
    with Calls() as calls:
        checkpoint(
            lambda *x: call([x[0], x[1], args[2], x[2], *args[4:]]), *tensors, use_reentrant=True
        ).backward()
    assert calls.masks("linear_cross_entropy_forward") == [[False] * 3, [True] * 3]
    for tensor, gradient in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_a_second_backward_equals_the_first(dtype: torch.dtype, reduction: str) -> None:
    """Nothing that the forward computed for the backward is written to, and gradients accumulate
    over two losses of one head."""
    args, tensors = leaves(HeadCase(reduction=reduction, dtype=dtype))
    loss = call(args).sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for _ in range(2):
        call(args).sum().backward()
    for tensor, gradient in zip(tensors, first, strict=True):
        assert torch.equal(tensor.grad, gradient + gradient)


def test_what_the_forward_computed_serves_once_and_for_any_loss() -> None:
    """A loss of the loss; and the forward op itself, of which some gradients were not asked for."""
    args, tensors = leaves(HeadCase(dtype=torch.float64))
    expected = [3 * gradient for gradient in torch.autograd.grad(call(args), tensors)]
    for mask in MASKS:
        outputs = library.OPS["linear_cross_entropy_forward"].overload(
            *args, False, False, list(mask)
        )
        with Calls() as calls:
            gradients = torch.autograd.grad(3 * outputs[0], tensors)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b)
        missing = [not computed for computed in mask]
        assert calls.recomputed() == ([missing] if any(missing) else [])


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_every_result_has_its_gradient(which: int, reduction: str) -> None:
    """z_loss, lse and target_logit beside the loss, against autograd through the definition."""
    case = HeadCase(
        reduction=reduction,
        dtype=torch.float64,
        lse_square_scale=0.1,
        softcap=3.0,
        token_weight=True,
        class_weight=True,
    )
    args, tensors = leaves(case)
    mask = [True] * 3 if reduction == "mean" else [False] * 3
    ours = FORWARD.overload(*args, False, False, mask)
    theirs = FORWARD.definition(*args)
    assert all(output.requires_grad for output in ours[:4])
    assert not any(output is not None and output.requires_grad for output in ours[4:])
    upstream = torch.rand_like(theirs[which])
    for a, b in zip(
        torch.autograd.grad(ours[which] * 1, tensors, upstream),
        torch.autograd.grad(theirs[which], tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    ours, theirs = FORWARD.overload(*args, False, False, mask), FORWARD.definition(*args)
    for a, b in zip(
        torch.autograd.grad(sum(output.sum() for output in ours[:4]), tensors),
        torch.autograd.grad(sum(output.sum() for output in theirs[:4]), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_vocabulary_on_two_devices() -> None:
    """The loss of lse and target_logit of each half, which ignores the targets of the other."""
    args, tensors = leaves(HeadCase(dtype=torch.float64, ignored="none", V=12, reduction="sum"))
    x, weight, target, bias = args[:4]
    lses, target_logits = [], []
    for half in (slice(0, 6), slice(6, 12)):
        here = (target >= half.start) & (target < half.stop)
        local = torch.where(here, target - half.start, -100)
        outputs = liger_ops.linear_cross_entropy_forward(x, weight[half], local, bias[half])
        lses.append(outputs[2])
        target_logits.append(outputs[3])
    lse = torch.logsumexp(torch.stack(lses), 0)
    loss = (lse - sum(target_logits)).sum()
    expected = unfused(args)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(
        torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_derivatives(reduction: str) -> None:
    case = HeadCase(
        shape=(4,),
        D=3,
        V=5,
        rows=2,
        dtype=torch.float64,
        reduction=reduction,
        label_smoothing=0.1,
        lse_square_scale=0.1,
        softcap=3.0,
        class_weight=True,
        token_weight=True,
    )
    args, tensors = leaves(case)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return call([x, weight, args[2], bias, *args[4:]])

    assert torch.autograd.gradcheck(loss, tensors)
    assert torch.autograd.gradgradcheck(loss, tensors)
    plain = tuple(tensor.detach() for tensor in tensors)
    summed = lambda *given: loss(*given).square().sum()
    unsplit = lambda x, weight, bias: (
        FORWARD.definition(x, weight, args[2], bias, *args[4:])[0].square().sum()
    )
    every = (0, 1, 2)
    compare = torch.testing.assert_close
    compare(torch.func.grad(summed, every)(*plain), torch.func.grad(unsplit, every)(*plain))
    tangents = tuple(torch.randn_like(tensor) for tensor in plain)
    compare(torch.func.jvp(summed, plain, tangents), torch.func.jvp(unsplit, plain, tangents))
    batch = torch.stack([plain[0], plain[0] * 2])
    compare(
        torch.vmap(torch.func.grad(summed), (0, None, None))(batch, *plain[1:]),
        torch.stack([torch.func.grad(unsplit)(x, *plain[1:]) for x in batch]),
    )


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@EVERY_DTYPE
@pytest.mark.parametrize("shape", ((), (1,), (0,), (2, 0), (4,)))
def test_few_tokens_and_none(shape: tuple[int, ...], dtype: torch.dtype, reduction: str) -> None:
    """As PyTorch: of tokens that are all ignored, or of none, the mean is NaN, and no gradient."""
    for ignored in ("none", "all"):
        args, tensors = leaves(
            HeadCase(shape=shape, dtype=dtype, reduction=reduction, ignored=ignored, rows=1)
        )
        ours, theirs = call(args), unfused(args)
        torch.testing.assert_close(ours, theirs, equal_nan=True, check_dtype=False)
        upstream = torch.ones_like(ours)
        counted = ignored == "none" and args[2].numel()
        for gradient in torch.autograd.grad(ours, tensors, upstream):
            assert not gradient.isnan().any()
            assert counted or not gradient.any()


def test_ignored_tokens_have_no_gradient_beside_others() -> None:
    args, (x, _, _) = leaves(HeadCase(shape=(40,), dtype=torch.float32))
    call(args).backward()
    ignored = args[2] == -100
    assert ignored.any() and not ignored.all()
    assert not x.grad[ignored].any()
    assert x.grad[~ignored].any(-1).all()


def test_float16_neither_overflows_nor_vanishes() -> None:
    """A loss scale and many tokens of one class: the unscaled gradient of the sum is beyond float16
    for weight, and the scaled mean is within."""
    tokens, scale = 4096, 65536.0
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(tokens, 4, generator=generator)).half().requires_grad_()
    weight = (0.01 * torch.randn(8, 4, generator=generator)).half().requires_grad_()
    target = torch.zeros(tokens, dtype=torch.int64)
    for factor in (scale / 1024, 1e-4):
        loss = liger_ops.linear_cross_entropy(x, weight, target, chunk_bytes=4096)
        gradients = torch.autograd.grad(loss * factor, (x, weight))
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target) * factor, wide)
        for gradient, truth in zip(gradients, expected, strict=True):
            assert gradient.dtype is torch.float16 and gradient.isfinite().all()
            assert (gradient.double() - truth).norm() <= 2e-3 * truth.norm() + 6e-8
    total = liger_ops.linear_cross_entropy(x, weight, target, reduction="sum")
    (dweight,) = torch.autograd.grad(total / tokens, (weight,))
    assert dweight.isfinite().all() and dweight.any()
    # The sum's gradient of x is beyond float16 where the mean's is not.
    x, weight = torch.zeros(tokens, 1), torch.tensor([[-5e4], [5e4]])
    x, weight = x.half().requires_grad_(), weight.half()
    token_weight = torch.full((tokens,), 4.0)
    loss = liger_ops.linear_cross_entropy(x, weight, target, token_weight=token_weight)
    (dx,) = torch.autograd.grad(loss, (x,))
    torch.testing.assert_close(dx, torch.full_like(x, 5e4 / tokens))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_is_that_of_linear(dtype: torch.dtype) -> None:
    """The result and the gradients are those of tensors that the caller cast, to the bit: what the
    op does inside is not cast again, the float32 sums of the chunks above all."""
    args, tensors = leaves(HeadCase(class_weight=True, token_weight=True))
    narrow = [tensor.to(dtype) if i in (0, 1, 3) else tensor for i, tensor in enumerate(args)]
    expected = call(narrow)
    expected_gradients = torch.autograd.grad(expected, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(lambda args: call(args), fullgraph=True, backend="aot_eager")
    for run in (call, compiled):
        with torch.autocast("cpu", dtype):
            loss = run(args)
            gradients = torch.autograd.grad(loss, tensors)
        assert torch.equal(loss, expected)
        for a, b in zip(gradients, expected_gradients, strict=True):
            assert a.dtype is torch.float32
            assert torch.equal(a, b)
    with torch.autocast("cpu", dtype):
        dweight = FORWARD.overload(*args, False, False, [False, True, False])[8]
    assert torch.equal(dweight, FORWARD.definition(*args, False, False, [False, True, False])[8])


def test_autocast_on_the_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    args, _ = leaves(HeadCase(class_weight=True, token_weight=True))
    args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    narrow = [arg.bfloat16() if i in (0, 1, 3) else arg for i, arg in enumerate(args)]
    with torch.autocast("npu", torch.bfloat16):
        on_npu = call([simulated_npu.to_npu(arg) for arg in args])
    torch.testing.assert_close(simulated_npu.to_cpu(on_npu), call(narrow))


def test_float64_is_not_cast() -> None:
    args, _ = leaves(HeadCase(dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(args), call(args))
        assert call(args).dtype is torch.float64


@pytest.mark.parametrize("mask", [mask for mask in MASKS if any(mask)])
def test_compiled_once_and_asked_for_what_is_needed(mask: tuple[bool, ...]) -> None:
    """The graph holds the forward op whole, and no other: its gradients are multiplied. That of a
    frozen head asks for no gradient of the head."""
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: call(list(args)) * 2, fullgraph=True, dynamic=True, backend=recorder.backend()
    )
    for rows in (3, 5):
        args, tensors = leaves(HeadCase(shape=(2, rows), rows=2))
        for tensor, wanted in zip(tensors, mask, strict=True):
            tensor.requires_grad_(wanted)
        wanted_of = [tensor for tensor in tensors if tensor.requires_grad]
        expected = torch.autograd.grad(call(args) * 2, wanted_of)
        for a, b in zip(torch.autograd.grad(compiled(*args), wanted_of), expected, strict=True):
            assert torch.equal(a, b)
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert liger_ops_of(recorder.forwards) == {"linear_cross_entropy_forward": 1}
    assert liger_ops_of(recorder.backwards) == {"linear_cross_entropy_backward": 1}
    (node,) = (
        node
        for node in recorder.forwards[0].graph.nodes
        if "linear_cross_entropy_forward" in str(node.target)
    )
    assert node.args[17] == list(mask)


def test_compiled_without_gradients_computes_none() -> None:
    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: call(list(args)), fullgraph=True, backend=recorder.backend()
    )
    args, _ = leaves(HeadCase())
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), call(args))
    graphs = recorder.forwards + recorder.backwards
    (node,) = (n for graph in graphs for n in graph.graph.nodes if "liger" in str(n.target))
    assert len(node.args) < 18 or node.args[17] == [False] * 3


def test_inductor_gives_what_eager_gives() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: call(list(args)), fullgraph=True, dynamic=True)
    for dtype, rows in ((torch.float32, 3), (torch.float32, 5), (torch.bfloat16, 4)):
        args, tensors = leaves(HeadCase(shape=(2, rows), dtype=dtype))
        ours, expected = compiled(*args), call(args)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(
            torch.autograd.grad(ours, tensors), torch.autograd.grad(expected, tensors)
        )


@pytest.mark.device_kernels
@pytest.mark.parametrize("implementation", ("definition", *FOLDERS))
@pytest.mark.parametrize("backward", (False, True))
def test_the_logits_are_never_whole_in_memory(implementation: str, backward: bool) -> None:
    case = HeadCase(shape=(256,), V=256, D=4, rows=4, dtype=torch.bfloat16)
    op = BACKWARD if backward else FORWARD
    tensors, options = tensors_of(case), options_of(case)
    *_, lse, _, total_weight = FORWARD.definition(*tensors, *options)[:5]
    args = [*tensors, *options, True, True, [True] * 3]
    if backward:
        ones = torch.ones((), device=DEVICE)
        upstream = [ones, None, None, None]
        args = [*upstream, *tensors, lse, total_weight, *NOT_COMPUTED, *options, [True] * 3]
    function = op.definition if implementation == "definition" else op.kernels[implementation]
    with Calls() as calls:
        function(*args)
    # The definition has int64 and float32 tensors of a chunk.
    assert 4 * 256 * 2 <= calls.largest <= 4 * 256 * 8
    products = [name for name, _ in calls.calls if name in ("aten::mm", "aten::addmm")]
    assert len(products) >= 3 * 64


def test_a_target_out_of_range_is_an_error() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    for wrong in (4, -1, 2**40):
        with pytest.raises(IndexError, match="target"):
            liger_ops.linear_cross_entropy(x, weight, torch.tensor([0, wrong]))


def reject(error: type[Exception], message: str, op: str = "forward", **changes: Any) -> None:
    args = {
        "x": torch.zeros(2, 3),
        "weight": torch.zeros(4, 3),
        "target": torch.zeros(2, dtype=torch.int64),
        **changes,
    }
    function = liger_ops.linear_cross_entropy
    for compiled in (False, True):
        torch._dynamo.reset()
        run = torch.compile(function, backend="eager", fullgraph=True) if compiled else function
        with pytest.raises(Exception) as caught:
            run(**args)
        assert compiled or isinstance(caught.value, error), caught.value
        # Dynamo quotes the message, and escapes the quotes in it.
        assert f"linear_cross_entropy: {message}" in str(caught.value).replace("\\'", "'")


def test_rejects() -> None:
    bfloat16 = torch.bfloat16
    reject(
        TypeError,
        "weight must have x's dtype, torch.float32, got torch.bfloat16",
        weight=torch.zeros(4, 3, dtype=bfloat16),
    )
    reject(
        TypeError,
        "bias must have x's dtype, torch.float32, got torch.bfloat16",
        bias=torch.zeros(4, dtype=bfloat16),
    )
    for shape in ((4, 2), (3,), (0, 3)):
        reject(
            ValueError,
            f"weight must be (V, D) with D of x, 3, and at least one class, got {shape}",
            weight=torch.zeros(shape),
        )
    reject(ValueError, "x must be (..., D), got shape ()", x=torch.tensor(1.0))
    reject(
        ValueError,
        "target must have the shape of x but for its last dimension, (2,), got (3,)",
        target=torch.zeros(3, dtype=torch.int64),
    )
    reject(TypeError, "target must be int64 or int32, got torch.float32", target=torch.zeros(2))
    reject(
        ValueError,
        "bias must have the shape of weight's rows, (4,), got (3,)",
        bias=torch.zeros(3),
    )
    reject(
        ValueError,
        "class_weight must have the shape of weight's rows, (4,), got (3,)",
        class_weight=torch.zeros(3),
    )
    for chunk_bytes in (0, -1):
        reject(
            ValueError,
            f"chunk_bytes must be above 0 or None, got {chunk_bytes}",
            chunk_bytes=chunk_bytes,
        )
    reject(
        ValueError,
        "accum_dtype must be torch.float32 or None, got torch.bfloat16",
        accum_dtype=bfloat16,
    )
    reject(
        ValueError,
        "reduction must be one of 'none', 'mean', 'sum', got 'average'",
        reduction="average",
    )


def test_a_gradient_that_there_is_not_is_refused() -> None:
    args, _ = leaves(HeadCase(class_weight=True, token_weight=True))
    for i, name in ((4, "class_weight"), (5, "token_weight")):
        given = list(args)
        given[i] = args[i].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"linear_cross_entropy: {name} must not require"):
            call(given)
    x, weight, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be all False for the reduction 'none'"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, reduction="none", gradient_mask=[True, False, False]
        )
    with pytest.raises(ValueError, match=r"gradient_mask\[2\] must be False without a bias"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, gradient_mask=[False, False, True]
        )


@EVERY_DTYPE
def test_opcheck(dtype: torch.dtype) -> None:
    args, tensors = leaves(HeadCase(dtype=dtype, class_weight=True, token_weight=True))
    torch.library.opcheck(FORWARD.overload, (*args, True, True, [True] * 3))
    torch.library.opcheck(torch.ops.liger.linear_cross_entropy.default, tuple(args))
    outputs = [output.detach() for output in FORWARD.definition(*args)[:5]]
    upstream = [torch.ones_like(output) for output in outputs[:4]]
    plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    statistics = (outputs[2], outputs[4])
    computed = [torch.ones_like(tensor) for tensor in tensors]
    for made in (NOT_COMPUTED, computed):
        arguments = (*upstream, *plain[:7], *statistics, *made, *plain[7:], [True, False, True])
        torch.library.opcheck(BACKWARD.overload, arguments)


@pytest.mark.parametrize("backend", (None, "aot_eager"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_training_on_the_simulated_npu(
    backend: str | None, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    simulated_npu.forget()
    args, tensors = leaves(HeadCase(reduction=reduction))
    expected = torch.autograd.grad(call(args).sum(), tensors)
    given = [simulated_npu.to_npu(a.detach()) if isinstance(a, Tensor) else a for a in args]
    for i in (0, 1, 3):
        given[i].requires_grad_()
    torch._dynamo.reset()
    run = call
    if backend:
        run = torch.compile(lambda args: call(args), backend=backend, fullgraph=True)
    loss = run(given).sum()
    gradients = torch.autograd.grad(loss, [given[i] for i in (0, 1, 3)])
    modules = {name.rpartition(".")[0] for name in simulated_npu.launched}
    assert modules and all(m.startswith("liger_ops.lowering.npu.") for m in modules)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(simulated_npu.to_cpu(gradient), reference)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_module_gives_what_the_op_gives(dtype: torch.dtype) -> None:
    case = HeadCase(dtype=dtype, class_weight=True, token_weight=True, lse_square_scale=0.1)
    args, tensors = leaves(case)
    x, weight, target, bias, class_weight, token_weight, _, *options = args
    named = {"lse_square_scale": 0.1, "chunk_bytes": options[7]}
    plain = LinearCrossEntropyLoss(class_weight, **named)
    asked = LinearCrossEntropyLoss(
        class_weight,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
        return_entropy=True,
        **named,
    )
    expected = FORWARD.definition(*args, True, True)
    gradients = torch.autograd.grad(call(args), tensors)
    loss = plain(x, weight, target, bias, token_weight)
    output = asked(x, weight, target, bias, token_weight)
    compiled = torch.compile(asked, fullgraph=True, backend="aot_eager")
    for result in (output, compiled(x, weight, target, bias, token_weight)):
        assert isinstance(result, CrossEntropyOutput)
        assert torch.equal(result.loss, loss)
        torch.testing.assert_close(result.z_loss, expected[1])
        assert torch.equal(result.predicted_tokens, expected[5])
        torch.testing.assert_close(result.entropy, expected[6])
        kept = target != -100
        hits = (F.linear(x, weight, bias).argmax(-1) == target)[kept]
        assert float(result.token_accuracy) == pytest.approx(float(hits.double().mean()))
    for result in (loss, output.loss):
        for a, b in zip(torch.autograd.grad(result, tensors), gradients, strict=True):
            assert torch.equal(a, b)
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        asked(x.float(), weight.float(), target, bias.float(), token_weight)
    (arguments,) = calls.arguments("linear_cross_entropy_forward")
    assert {arguments[i].dtype for i in (0, 1, 3)} == {torch.bfloat16}


def test_module_takes_the_items_of_a_batch() -> None:
    args, _ = leaves(HeadCase(dtype=torch.float64))
    x, weight, target, bias = args[:4]
    expected = liger_ops.linear_cross_entropy(x, weight, target, bias, reduction="sum") / 12
    for items in (12, 12.0, torch.tensor(12)):
        loss = LinearCrossEntropyLoss()(x, weight, target, bias, num_items_in_batch=items)
        torch.testing.assert_close(loss, expected)


def test_module_says_its_options() -> None:
    module = LinearCrossEntropyLoss(reduction="sum", softcap=30.0, chunk_bytes=2**20)
    assert (
        repr(module) == "LinearCrossEntropyLoss(reduction='sum', softcap=30.0, chunk_bytes=1048576)"
    )
    assert repr(LinearCrossEntropyLoss()) == "LinearCrossEntropyLoss()"
    with pytest.raises(ValueError, match="chunk_bytes must be above 0 or None, got 0"):
        LinearCrossEntropyLoss(chunk_bytes=0)
    with pytest.raises(ValueError, match="reduction must be one of"):
        LinearCrossEntropyLoss(reduction="average")
