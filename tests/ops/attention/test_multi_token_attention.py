"""multi_token_attention: its kernels and its op against float64 truth, and against the code of
models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

import liger_ops
import op_checks
import strategies
from liger_ops import library
from liger_ops.lowering.common.attention import multi_token_attention as host
from multi_token_cases import INPUTS, convolution
from op_checks import FLOAT32_ROUNDINGS
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, drawn_for
from plans import plan

pytestmark = pytest.mark.usefixtures("without_tf32")
OP = OPS["multi_token_attention_forward"]
FORMS = pytest.mark.parametrize("sparse", (False, True), ids=("softmax", "sparsemax"))
FEWER = settings(max_examples=settings().max_examples // 2)


def written(
    scores: Tensor, weight: Tensor, bias: Tensor | None, sparse: bool = False, **options: Any
) -> Tensor:
    """The code of models."""
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    masked = scores.masked_fill(~mask, -torch.inf)
    p = liger_ops.sparsemax(masked) if sparse else F.softmax(masked, -1)
    y = F.conv2d(p, weight, bias, **options)
    mask = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device).tril()
    return y.masked_fill(~mask, 0.0)


def run_kernels(folder: str, case: Any, scores: Tensor, dp: Tensor) -> tuple[Tensor, Tensor]:
    """p, and the gradient of scores, by the kernels alone; the latter is written over dp."""
    module = import_module(f"liger_ops.lowering.{folder}.attention.multi_token_attention")
    forward, backward = (plan_of(folder, case, way) for way in (False, True))
    with op_checks.poisoned_memory():
        p = torch.empty(scores.shape, dtype=dp.dtype, device=scores.device)
        module.launch_forward(scores, p, case.sparse, forward)
        dscores = dp.clone(memory_format=torch.contiguous_format)
        if dscores.dtype == scores.dtype:
            module.launch_backward(dscores, scores, dscores, case.sparse, backward)
        else:
            dscores = torch.empty_like(scores, memory_format=torch.contiguous_format)
            module.launch_backward(dp, scores, dscores, case.sparse, backward)
    return p, dscores


def plan_of(folder: str, case: Any, backward: bool) -> Any:
    if folder == "cuda" and case.tile is not None and case.tile[1] < case.shape[-1]:
        from liger_ops.lowering.cuda.launch import TwoPass

        return TwoPass(case.tile[1])
    return plan(folder, OPS["sparsemax_forward"], case, backward)


@pytest.mark.device_kernels
@EVERY_FOLDER
@FORMS
@pytest.mark.parametrize("tile", (None, (1, 16)), ids=("whole", "wide"))
@settings(max_examples=settings().max_examples // 8)
@given(case=strategies.cases(OP))
def test_the_kernels_match_truth(
    folder: str, sparse: bool, tile: tuple[int, int] | None, case: Any
) -> None:
    """p and the gradient of scores; scores where j > i are NaN, and so is dp."""
    L = 20 if tile else case.shape[-1]
    case = replace(case, shape=(1, 2, L, L), sparse=sparse, tile=tile)
    values = drawn_for(case)
    future = torch.ones(case.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
    scores = values.draw(case.shape, case.dtype, case.layout, case.scale, case.shift)
    dp = values.draw(case.shape, case.weight_dtype, case.layout)
    wide = scores.double().requires_grad_()
    truth = written(wide, torch.ones(case.shape[1], 1, 1, 1).double().to(DEVICE), None,
                    case.sparse, groups=case.shape[1])  # fmt: skip
    (gradient,) = torch.autograd.grad(truth, wide, dp.double())
    unread = [tensor.masked_fill(future, torch.nan) for tensor in (scores, dp)]
    p, dscores = run_kernels(folder, case, *unread)
    assert p.dtype == dp.dtype and dscores.dtype == scores.dtype
    rounding = FLOAT32_ROUNDINGS * 2**-23
    # A rounding of the difference to the maximum is a relative error of its exponential.
    largest = wide.masked_fill(future, -torch.inf).amax(-1, keepdim=True)
    spread = 2 + (largest - wide).clamp(max=100.0).masked_fill(future, 0.0).abs()
    relative = 1.0 if case.sparse else truth * spread
    allowed = torch.finfo(p.dtype).eps * truth + rounding * relative + torch.finfo(p.dtype).tiny
    assert ((p.double() - truth).abs() <= allowed).all()
    terms = dp.double().masked_fill(future, 0.0).abs().amax(-1, keepdim=True)
    if not case.sparse:
        terms = terms * truth * (spread + (truth * spread).sum(-1, keepdim=True))
    eps, tiny = torch.finfo(dscores.dtype).eps, torch.finfo(dscores.dtype).tiny
    allowed = eps * gradient.abs() + 2 * rounding * terms + tiny
    assert ((dscores.double() - gradient).abs() <= allowed).all()


@FEWER
@given(case=strategies.cases(OP))
def test_the_definition_is_the_code_of_models(case: Any) -> None:
    tensors = OP.tensors(case)
    leaves = [None if tensors[n] is None else tensors[n].double().requires_grad_() for n in INPUTS]
    names = ("stride", "padding", "dilation", "groups")
    options = dict(zip(names, convolution(case), strict=True))
    ours = liger_ops.multi_token_attention(*leaves, *OP.options(case))
    theirs = written(*leaves, case.sparse, **options)
    weight, given = torch.randn_like(ours), [leaf for leaf in leaves if leaf is not None]
    grads = [torch.autograd.grad(y, given, weight) for y in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@FORMS
def test_gradcheck_of_a_mixture(sparse: bool) -> None:
    case = OP.sample(rows=2, sparse=sparse, kernel=(3, 1), padding=(1, 0), dilation=(1,))
    tensors = OP.tensors(case)
    leaves = [tensors[name].requires_grad_() for name in INPUTS]

    def call(*tensors: Tensor) -> Tensor:
        return liger_ops.multi_token_attention(*tensors, *OP.options(case))

    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_part_of_the_batch_at_a_time(
    folder: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes roundings alone, and weights' gradients are summed in float32."""
    case = OP.case(shape=(12, 2, 5, 5), dtype=dtype, groups=2)
    args = OP.backward_args(case, OP.tensors(case))
    (whole, *_) = op_checks.run_kernel(OP, folder, True, case, args)
    truths = library.OPS[OP.backward_name].definition(*op_checks.widened(args))
    taken: list[slice] = []
    chunks = host.chunks

    def noted(*sizes: Any) -> Iterator[slice]:
        taken.extend(chunks(*sizes))
        return iter(taken)

    monkeypatch.setattr(host, "chunks", noted)
    # The widest of p and dy has 4 * 5 * 5 elements in a sample.
    for samples in (1, 4):
        monkeypatch.setattr(host, "CHUNK_BYTES", samples * 100 * dtype.itemsize)
        taken.clear()
        dscores, *totals = op_checks.run_kernel(OP, folder, True, case, args)
        assert taken == [slice(i, i + samples) for i in range(0, 12, samples)]
        torch.testing.assert_close(dscores, whole)
        for name, total, truth in zip(INPUTS[1:], totals, truths[1:], strict=True):
            # A part's gradient of weight is rounded by at most half a unit in its last place.
            parts = (12 / samples) ** 0.5 if name == "weight" else 1
            allowed = truth.abs().max() * torch.finfo(dtype).eps * parts + 1e-5
            assert ((total.double() - truth).abs() <= allowed).all()


@EVERY_FOLDER
def test_weights_gradients_are_summed_in_float32(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 each of the later samples' ones would be rounded away beside 512."""
    case = OP.case(shape=(17, 1, 1, 1), dtype=torch.bfloat16, out=1, kernel=(1, 1))
    case = replace(case, padding=(0,))
    tensors = {name: torch.ones_like(given) for name, given in OP.tensors(case).items()}
    tensors["dy"][0] = 512
    monkeypatch.setattr(host, "CHUNK_BYTES", 1)
    _, dweight, dbias = op_checks.run_kernel(
        OP, folder, True, case, OP.backward_args(case, tensors)
    )
    assert dweight.item() == dbias.item() == 528


@pytest.mark.device_kernels
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@EVERY_FOLDER
@FORMS
@pytest.mark.parametrize("tile", (None, (1, 16)))
def test_infinities(folder: str, sparse: bool, tile: tuple[int, int] | None) -> None:
    """As softmax: -inf gives 0; a row of only -inf, or with inf or NaN, is NaN, and so is its
    gradient. What is at j > i changes nothing."""
    scores = torch.randn(1, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    scores[..., 3, :4] = -torch.inf
    scores[..., 20, 7], scores[..., 21, 0], scores[..., 39, 1:] = torch.inf, torch.nan, -torch.inf
    scores[..., 5, 6:], scores[..., 6, 7], scores[..., 22, :22] = torch.inf, torch.nan, -torch.inf
    scores = scores.to(DEVICE)
    case = OP.case(shape=(1, 1, 40, 40), dtype=torch.float32, sparse=sparse, tile=tile)
    p, dscores = run_kernels(folder, case, scores, torch.ones_like(scores))
    one = torch.ones(1, 1, 1, 1, device=DEVICE)
    masked = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    expected = liger_ops.sparsemax(masked) if sparse else torch.softmax(masked, -1)
    torch.testing.assert_close(p, expected, equal_nan=True)
    assert p.isnan().all(-1).nonzero()[:, 2].tolist() == [3, 20, 21]
    assert torch.equal(dscores.isnan(), p.isnan())
    y = OP.kernel(folder)(scores, one, None, [1], [0], [1], 1, sparse)
    torch.testing.assert_close(y, expected.tril(), equal_nan=True)


def test_autocast_is_that_of_models() -> None:
    """Scores stay in float32, and the convolution runs in bfloat16."""
    tensors = OP.tensors(OP.case(shape=(2, 2, 7, 7), dtype=torch.float32))
    leaves = [tensors[name].cpu().requires_grad_() for name in INPUTS]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = liger_ops.multi_token_attention(*leaves, padding=1)
        expected = written(*leaves, padding=1)
    assert y.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    grads = [torch.autograd.grad(x.float().square().sum(), leaves) for x in (y, expected)]
    assert {grad.dtype for grad in grads[0]} == {torch.float32}
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@FORMS
def test_module_is_the_op_with_the_parameters_of_a_convolution(sparse: bool) -> None:
    torch.manual_seed(0)
    module = liger_ops.nn.MultiTokenAttention(4, 6, [3, 5], 1, [1, 2], groups=2, sparse=sparse)
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(4, 6, (3, 5), padding=(1, 2), groups=2)
    assert torch.equal(module.weight, conv.weight) and (module.bias == 0).all()
    module.load_state_dict(conv.state_dict())
    scores = torch.randn(2, 4, 8, 8)
    expected = written(scores, conv.weight, conv.bias, sparse, padding=(1, 2), groups=2)
    torch.testing.assert_close(module(scores), expected)
    assert repr(module) == (
        "MultiTokenAttention(4, 6, kernel_size=[3, 5], stride=[1, 1], padding=[1, 2],"
        f" dilation=[1, 1], groups=2, bias=True, sparse={sparse})"
    )
    assert liger_ops.nn.MultiTokenAttention(2, 2, 1, bias=False).bias is None


def test_module_rejects() -> None:
    module = liger_ops.nn.MultiTokenAttention
    for arguments, error, message in (
        ((2.0, 4, 3), TypeError, "MultiTokenAttention: in_channels must be an int, got float"),
        ((2, 4, 0), ValueError, "MultiTokenAttention: kernel_size must be at least 1, got 0"),
        ((3, 4, 3, 1, 0, 1, 2), ValueError, "multi_token_attention: groups must divide the 3"),
        ((2, 4, [3, 5]), ValueError, "multi_token_attention: weight, stride, padding and dil"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            module(*arguments)
