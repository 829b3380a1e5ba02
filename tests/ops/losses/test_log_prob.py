"""log_prob's kernels of both devices against float64 truth, and its composed op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import liger_ops
import op_checks
import strategies
from liger_ops import library
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, EVERY_IMPLEMENTATION, INF, NAN

OP = OPS["log_prob_forward"]


def expected(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities as models and trainers write them."""
    log_p = x.log_softmax(-1)
    kept, one = target >= 0, target.dim() < x.dim()
    words = (target.unsqueeze(-1) if one else target).clamp(min=0).long()
    picked = log_p.gather(-1, words)
    entropy = torch.distributions.Categorical(logits=x, validate_args=False).entropy()
    counts = kept if one else kept.any(-1)
    picked = torch.where(kept, picked.squeeze(-1) if one else picked, 0.0)
    return picked, torch.where(counts, entropy, 0.0)


@given(case=strategies.cases(OP).filter(lambda case: case.ignore_index < 0))
def test_the_definition_is_what_trainers_write(case: Any) -> None:
    tensors = OP.tensors(case)
    logits, target = (tensors[name] for name in ("logits", "target"))
    logits = logits.double().requires_grad_()
    x = logits * case.logit_scale
    x = x if case.softcap is None else case.softcap * torch.tanh(x / case.softcap)
    theirs = expected(x / case.temperature, target)
    ours = liger_ops.log_prob(logits, target, *OP.options(case))
    weights = [torch.randn_like(value) for value in ours]
    grads = [torch.autograd.grad(values, logits, weights)[0] for values in (ours, theirs)]
    for a, b in zip((*ours, grads[0]), (*theirs, grads[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("tile", (None, (2, 16), (1, 16)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_infinities_and_nan(folder: str, tile: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """A class of -inf has probability 0 and adds nothing, and its gradient is 0 however large the
    incoming gradient is; a row of only -inf, or with inf or NaN, gives NaN unless it is ignored.
    The mean of the logits is infinite where one of them is."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[0, :33] = x[1, 20:] = x[2, 1:] = x[3] = -INF
    x[4, 5] = INF
    x[5, 39] = x[6] = NAN
    target = torch.tensor([39, 0, 0, 1, 2, 3, -100, -100], device=DEVICE)
    case = OP.case(shape=(8, 40), dtype=dtype, tile=tile)
    outputs = op_checks.run_kernel(
        OP, folder, False, case, (x, target, *OP.options(case), True, True)
    )
    log_prob, entropy, lse, mean, squares, _, error = outputs
    assert mean.tolist()[:5] == [-INF] * 4 + [INF] and mean[5].isnan()
    assert squares[3:6].isnan().all() and bool((torch.stack((mean, squares))[:, 6:] == 0).all())
    p = x[:3].double().softmax(-1)
    torch.testing.assert_close(squares[:3], p.square().sum(-1).log().float())
    for values in (log_prob, entropy, lse):
        assert values[[0, 1, 2]].isfinite().all() and bool((values[[6, 7]] == 0).all())
    for values in (log_prob, entropy):
        assert values[[3, 4, 5]].isnan().all()
    assert (log_prob[2], entropy[2]) == (0, 0)
    grads = [torch.full((8,), value, device=DEVICE) for value in (3.0, -5.0)]
    args = (*grads, None, x, target, entropy, lse, error, *OP.options(case))
    (dx,) = op_checks.run_kernel(OP, folder, True, case, args)
    assert dx[[3, 4, 5]].isnan().all() and bool((dx[[6, 7]] == 0).all())
    good = x[:3].double().requires_grad_()
    log_p = good.log_softmax(-1)
    # 0 * -inf would be NaN.
    terms = log_p.exp() * torch.where(good.isinf(), 0.0, log_p)
    value = 3 * log_p[range(3), target[:3]].sum() + 5 * terms.sum()
    (truth,) = torch.autograd.grad(value, good)
    truth = torch.where(good.isinf(), 0.0, truth).to(dtype)
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(dx[:3], truth, rtol=bound, atol=16 * bound * bound + 2e-5)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.cases(OP))
def test_predictions(folder: str, case: Any) -> None:
    case = replace(case, return_predicted=True)
    args = OP.forward_args(case, OP.tensors(case))
    *_, predicted, _ = op_checks.run_kernel(OP, folder, False, case, args)
    logits, target, *_ = args
    counts = target != case.ignore_index
    counts = counts if case.K is None else counts.any(-1)
    assert torch.equal(predicted, logits.argmax(-1) * counts)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("V", (40, 70))
def test_each_statistic_by_itself(folder: str, V: int) -> None:
    """Each result has the same bits whatever else is requested."""
    case = OP.case(shape=(3, V), dtype=torch.float32, tile=(1, 64))
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    args = (logits, torch.tensor([V - 1, 0, -100], device=DEVICE), *OP.options(case))
    run = lambda *asked: op_checks.run_kernel(OP, folder, False, case, (*args, *asked))
    every = run(True, True, True)
    for asked in ((False, False, False), (True, False, False), (False, True, False)):
        for one, other, wanted in zip(
            run(*asked), every, (True,) * 3 + asked + (True,), strict=True
        ):
            assert torch.equal(one, other) if wanted else one is None


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("wrong", (-1, 33, 2**31 - 1))
def test_a_target_out_of_range_is_loud(folder: str, wrong: int) -> None:
    """The log-probability is NaN where no assertion stops the kernel, as in the interpreter."""
    if DEVICE == "cuda":
        pytest.skip("a device-side assertion ends the process's use of the GPU")
    logits = torch.zeros(3, 33, device=DEVICE)
    target = torch.tensor([1, wrong, -100], device=DEVICE)
    log_prob, *_ = OP.kernel(folder)(logits, target)
    assert log_prob.isnan().tolist() == [False, True, False]


def test_a_target_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="log_prob: target must be .*-100, or from 0 to 32"):
        liger_ops.log_prob(torch.zeros(3, 33), torch.tensor([1, 33, -100]))


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_undefined_logits_and_words(implementation: str) -> None:
    """A token of whose K words all are ignored gives 0, whatever its logits are; a class of
    -inf, and a word out of range, concern their own entry alone; and equal words share a gradient
    of the sum."""
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0], logits[1, 5:] = NAN, -INF
    words = torch.tensor([[-100, -100, -100], [5, 0, -100], [7, 7, 2], [1, 2, 3]], device=DEVICE)
    forward, backward = (
        library.OPS[name].kernels.get(implementation, library.OPS[name].definition)
        for name in ("log_prob_forward", "log_prob_backward")
    )
    log_prob, entropy, lse, *_, error = forward(logits, words)
    truth = logits.double().log_softmax(-1).gather(1, words.clamp(min=0)).float()
    expected = torch.where(words < 0, 0.0, truth)
    torch.testing.assert_close(log_prob, expected)
    assert not any(value[0] for value in (entropy, lse, error))
    grad = torch.tensor([[1.0, 2, 3], [0, 4, 5], [1, 2, 3], [-1, 0, 1]], device=DEVICE)
    options = (1.0, None, 1.0, -100)
    dlogits = backward(grad, None, None, logits, words, entropy, lse, error, *options)
    once = torch.tensor([[7, 2, -100]], device=DEVICE), torch.tensor([[3.0, 3, 0]], device=DEVICE)
    of_row = [x[2:3] for x in (entropy, lse, error)]
    alone = backward(once[1], None, None, logits[2:3], once[0], *of_row, *options)
    torch.testing.assert_close(dlogits[2:3], alone)
    assert not dlogits[0].any() and not dlogits[1, 5:].any() and dlogits[1:].isfinite().all()
    if DEVICE == "cpu" and implementation != "definition":
        for wrong in (33, -1, 2**31 - 1):
            words[3, 1] = wrong
            assert forward(logits, words)[0].isnan().nonzero().tolist() == [[3, 1]]
