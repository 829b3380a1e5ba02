"""router_losses: transformers' function of every layer, and what is its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import liger_ops
from graphs import Recorder, liger_ops_of
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

moe = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")


def layers(count: int, tokens: int, experts: int, dtype: torch.dtype) -> list[Tensor]:
    drawn = (torch.randn(tokens, experts, dtype=dtype, device=DEVICE) for _ in range(count))
    return [one.requires_grad_() for one in drawn]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("count", (1, 8, 11))
def test_it_is_the_function_of_transformers(dtype: torch.dtype, masked: bool, count: int) -> None:
    given = layers(count, 40, 16, dtype)
    mask = (torch.rand(4, 10, device=DEVICE) > 0.3).long() if masked else None
    expected = moe.load_balancing_loss_func(tuple(given), 16, 3, mask)
    weight = None if mask is None else mask.flatten()
    loss, z_loss = liger_ops.router_losses(given, 3, weight)
    # transformers sums in float32.
    torch.testing.assert_close(loss, expected.to(dtype), rtol=2e-6, atol=0)
    found, true = (torch.autograd.grad(one, given) for one in (loss, expected))
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-8)
    counted = torch.stack(given)[:, ... if mask is None else weight.bool()]
    torch.testing.assert_close(z_loss, counted.logsumexp(-1).square().mean())
    both = torch.autograd.grad(liger_ops.nn.RouterLosses(3)(given, weight)[1], given)
    of_z = torch.autograd.grad(counted.logsumexp(-1).square().mean(), given)
    torch.testing.assert_close(both, of_z)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_the_first_of_equal_logits_are_selected(folder: str, dtype: torch.dtype) -> None:
    low = -float("inf")
    rows = [[0, -0.0, 1, 0], [2, 2, 2, 2], [-1, -1, -2, -1], [low, 3, low, low]]
    args = (torch.tensor(rows, dtype=dtype, device=DEVICE), *[None] * 8, 2)
    assert OPS["router_losses_forward"].kernel(folder)(*args)[2].tolist() == [4, 3, 1, 0]


def test_a_token_without_weight_is_not_seen() -> None:
    given = layers(1, 3, 4, torch.float32)
    with torch.no_grad():
        given[0][1] = float("nan")
    weight = torch.tensor([1.0, 0.0, 0.5], device=DEVICE)
    losses = liger_ops.router_losses(given, 2, weight)
    (gradient,) = torch.autograd.grad(sum(losses), given)
    assert all(loss.isfinite() for loss in losses)
    assert gradient.isfinite().all() and gradient[1].count_nonzero() == 0


def test_changing_numbers_of_tokens_are_one_graph_of_an_op_for_eight_layers() -> None:
    recorder = Recorder()
    compiled = torch.compile(
        lambda *xs: liger_ops.router_losses(list(xs), 2)[0], fullgraph=True, dynamic=True,
        backend=recorder.backend(),
    )  # fmt: skip
    torch._dynamo.reset()
    for tokens in (6, 10):
        given = layers(9, tokens, 4, torch.float32)
        loss = compiled(*given)
        torch.testing.assert_close(loss, liger_ops.router_losses(given, 2)[0])
        loss.backward()
    assert len(recorder.forwards) == 1
    assert liger_ops_of(recorder.forwards) == {"router_losses_forward": 2}
    assert liger_ops_of(recorder.backwards) == {"router_losses_backward": 2}


def test_rejects() -> None:
    x = torch.zeros(3, 4, device=DEVICE)
    for given, top_k, message in (
        ([], 1, "gate_logits must have at least one tensor, got none"),
        ([x], 5, "top_k must be at most the number of experts, 4, got 5"),
        ([x, x[1:]], 1, "x1 must have the shape of x0, "),
    ):
        with pytest.raises(ValueError, match=f"router_losses: {message}"):
            liger_ops.router_losses(given, top_k)
